"""Layers are translated in groups, once, for the device, dtype and batch that take them; wild and broken states are flagged."""

from dataclasses import replace

import pytest
import torch
from builders import identity_translator, random_ids, tiny_model

from hf_crosscache.compat import prefill
from hf_crosscache.context import Context
from hf_crosscache.errors import GeometryError, HandOffError
from hf_crosscache.source import SourceStates
from hf_crosscache.translation import PendingTranslation, Stopwatch

MODEL = tiny_model("llama", num_hidden_layers=4)
TRANSLATOR = identity_translator(MODEL)
IDS = random_ids(2, 20)
NATIVE = prefill(MODEL, IDS)[0].layers
LAYERS = range(4)


def hand_off(translator=TRANSLATOR, dtype=torch.float32, damage=None, **changes):
    pairs = [(layer.keys.clone(), layer.values.clone()) for layer in NATIVE]
    if damage is not None:
        layer_idx, role, value = damage
        pairs[layer_idx][role][0, 0, 12, 3] = value
    source = SourceStates(pairs, translator.source.geometry, translator.readers)
    return PendingTranslation(source, translator, Context(20), None, dtype, **changes)


def like(tokens=1, rows=2, dtype=torch.float32, heads=2, dim=16):
    return torch.zeros(rows, heads, tokens, dim, dtype=dtype)


def assert_is(states, layer_idx, rows=slice(None), atol=1e-4):
    for found, native in zip(states, (NATIVE[layer_idx].keys, NATIVE[layer_idx].values), strict=True):
        torch.testing.assert_close(found.float(), native[:, :, rows], rtol=atol, atol=atol)


@pytest.fixture
def groups(monkeypatch):
    """The groups of layers that are translated, as on a device that builds two layers at once."""
    built, translate = [], PendingTranslation._translate
    monkeypatch.setattr(PendingTranslation, "_at_once", lambda *_: 2)
    monkeypatch.setattr(
        PendingTranslation, "_translate", lambda self, layers, *rest: built.append(list(layers)) or translate(self, layers, *rest)
    )
    return built


def test_a_layer_is_translated_once_with_its_neighbours(groups):
    pending = hand_off()
    for layer_idx in LAYERS:
        assert_is(pending.take(layer_idx, None), layer_idx)
    assert groups == [[0, 1], [2, 3]] and pending.complete and pending.translated_layers == 4
    assert pending.source.held_layers == ()


def test_in_any_order(groups):
    pending = hand_off()
    for layer_idx in (1, 3, 0, 2):
        assert_is(pending.take(layer_idx, None), layer_idx)
    assert groups == [[1, 2], [3], [0]]


def test_all_at_once_and_once_only(groups):
    pending = hand_off()
    for _ in range(2):
        pending.translate_all()
    assert groups == [[0, 1, 2, 3]]
    pending = hand_off()
    pending.take(1, None)
    pending.translate_all()
    assert groups[1:] == [[1, 2], [0], [3]]
    for layer_idx in (0, 2, 3):
        assert_is(pending.take(layer_idx, None), layer_idx)


def test_a_layer_that_was_dropped_is_not_built(groups):
    pending = hand_off()
    pending.drop(2)
    assert 2 not in pending.source.held_layers and not pending.untouched
    pending.translate_all()
    assert groups == [[0, 1], [3]] and pending.complete


@pytest.mark.parametrize("windows,expected", [((7, None, 7, None), [[0], [1], [2], [3]]), ((None, None, 7, 7), [[0, 1], [2, 3]])])
def test_groups_never_mix_windows(groups, windows, expected):
    pending = hand_off(windows=windows)
    pending.translate_all()
    assert groups == expected
    for layer_idx, window in enumerate(windows):
        assert pending.kept(layer_idx) == (window or 20)
        assert_is(pending.take(layer_idx, None), layer_idx, slice(-(window or 20), None))


def test_groups_never_mix_devices(groups):
    first, second = torch.device("cpu"), torch.device("cpu:0")
    pending = hand_off(devices=(first, first, second, first))
    pending.translate_all()
    assert groups == [[0, 1], [2], [3]]


def test_only_what_follows_the_start_is_built():
    pending = hand_off(start=14, windows=(None, 3, 9, None))
    for layer_idx, kept in enumerate((6, 3, 6, 6)):
        assert pending.kept(layer_idx) == kept
        assert_is(pending.take(layer_idx, None), layer_idx, slice(-kept, None))


@pytest.mark.parametrize("tokens", [1, 5])
def test_room_is_left_for_what_is_about_to_be_appended(tokens):
    keys, values = hand_off().take(0, like(tokens))
    assert keys.shape == values.shape == (2, 2, 20 + tokens, 16)
    assert_is((keys[:, :, :20], values[:, :, :20]), 0)
    assert hand_off(start=4).take(0, like(tokens))[0].shape[2] == 16  # joined to what a layer has already


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("built", [False, True], ids=["pending", "built"])
def test_states_are_of_the_dtype_that_takes_them(dtype, built):
    pending = hand_off()
    if built:
        pending.translate_all()
    keys, values = pending.take(1, like(dtype=dtype))
    assert keys.dtype == values.dtype == dtype
    assert_is((keys[:, :, :20], values[:, :, :20]), 1, atol=2e-2)


def test_rows_are_repeated_as_generate_repeats_them():
    keys, _ = hand_off().take(0, like(rows=6))
    assert torch.equal(keys[:, :, :20], hand_off().take(0, like())[0][:, :, :20].repeat_interleave(3, 0))
    with pytest.raises(HandOffError, match="holds 2 sequences, the target reads 5"):
        hand_off().take(0, like(rows=5))


@pytest.mark.parametrize("shape", [{"heads": 1}, {"dim": 8}])
def test_a_layer_of_another_shape_is_refused(shape):
    with pytest.raises(GeometryError, match="Target layer 2: 2 heads of 16 expected, the model has"):
        hand_off().take(2, like(**shape))


def with_reach(size):
    return replace(TRANSLATOR, reach={role: torch.full((4,), size) for role in ("keys", "values")})


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("value,reason", [(float("nan"), "not finite"), (float("-inf"), "not finite"), (1e5, "100 times as large")])
def test_what_must_not_be_used_is_found_in_whichever_layer(groups, value, reason, role):
    pending = hand_off(with_reach(10.0), damage=(1, role, value))
    with pytest.raises(HandOffError, match=f"Target layer 1: translated {('keys', 'values')[role]} are .*{reason}"):
        pending.take(0, None)  # built beside it
    assert pending.failure is not None
    for layer_idx in LAYERS:
        with pytest.raises(HandOffError, match="Target layer 1"):
            pending.take(layer_idx, None)


def test_size_is_no_fault_where_the_fit_did_not_note_it():
    pending = hand_off(damage=(1, 1, 1e5))
    pending.translate_all()
    assert pending.failure is None and pending.take(1, None)[1].abs().max() == 1e5


def test_none_is_taken_where_another_must_not_be_used(monkeypatch):
    monkeypatch.setattr(PendingTranslation, "_at_once", lambda *_: 1)
    assert_is(hand_off(damage=(3, 0, float("nan"))).take(0, None), 0)
    with pytest.raises(HandOffError, match="Target layer 3"):
        hand_off(damage=(3, 0, float("nan")), whole=True).take(0, None)


def test_a_context_is_shortened_before_it_is_built():
    pending = hand_off(start=5)
    pending.shorten(8)
    assert pending.length == 12 and pending.kept(0) == 7
    assert_is(pending.take(0, None), 0, slice(5, 12))
    pending = hand_off(start=5)
    pending.shorten(99)
    assert pending.length == 5 and pending.take(0, None)[0].shape[2] == 0


def test_a_stopwatch_adds_up_and_is_split_with_a_fork():
    watch = Stopwatch()
    with watch.on(torch.device("cpu")):
        sum(range(10_000))
    twin, first = watch.fork(), watch.seconds
    with watch.on(torch.device("cpu")):
        sum(range(10_000))
    assert watch.seconds > first == twin.seconds > 0
