"""A session hands each model what it lacks: exactly, once, never from a translation, and never what the model has read itself."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import accelerate
import pytest
import torch
from builders import generate, identity_translator, planted_twin, random_ids, tiny_model
from transformers import AutoTokenizer

from hf_crosscache import HandoffSession
from hf_crosscache.errors import GeometryError, HandOffError, HandOffWarning, IdentityError


def equals(family="llama", count=2, **settings):
    """Models of one function, exact translators between all of them, and a session over them."""
    model = tiny_model(family)
    names = "abc"[:count]
    models = {name: copy.deepcopy(model) for name in names}
    translator = identity_translator(model)
    return HandoffSession(models, {(one, other): translator for one in names for other in names if one != other}, **settings), model


def converse(session, model, names, new=6):
    """Let the models of a session take turns; return the session's conversation and that of one model alone."""
    alone = torch.empty((1, 0), dtype=torch.long)
    for turn, name in enumerate(names):
        said = random_ids(1, 5 + turn % 3, seed=turn)
        session.add(said).generate(name, max_new_tokens=new, do_sample=False)
        alone = generate(model, torch.cat([alone, said], 1), max_new_tokens=new)
    return session.input_ids, alone


@pytest.mark.parametrize("recompute_last", ["turn", 0, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere2"])
@pytest.mark.parametrize("names", ["ababab", "aabbab", "abcacbabc"])
def test_equal_models_say_what_one_of_them_says_alone(family, names, recompute_last):
    session, model = equals(family, count=3, recompute_last=recompute_last)
    mine, alone = converse(session, model, names)
    assert torch.equal(mine, alone)


@pytest.mark.parametrize("names", ["ababababab", "abcabcabca"])
def test_no_token_is_read_twice_by_a_model_and_each_only_as_often_as_needed(names):
    session, model = equals(count=3)
    seen = {name: [] for name in "abc"}
    for name, side in session._sides.items():
        side.model.model.embed_tokens.register_forward_hook(lambda _, args, __, name=name: seen[name].append(args[0].shape[1]))
    converse(session, model, names)
    for name in set(names):
        spans = session.native_spans(name)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
        assert sum(seen[name]) == sum(end - start for start, end in spans)
    assert sum(turn.translated for turn in session.turns) > 0
    for turn in session.turns:
        assert turn.held + turn.translated + turn.prefilled + turn.read + turn.generated <= session.input_ids.shape[1]


def test_a_switch_translates_only_what_is_new():
    session, model = equals()
    converse(session, model, "ab" * 8, new=4)
    later = [turn.translated for turn in session.turns[4:]]
    assert max(later) - min(later) <= 3  # as the turns differ in length, whatever the history


def test_native_states_are_never_replaced():
    """Translators that would give themselves away leave what a model has read itself as it was."""
    model = tiny_model("llama")
    twin, _ = planted_twin(model)
    wrong = identity_translator(model)  # right in shape, wrong between these two
    other = identity_translator(twin)
    session = HandoffSession(
        {"a": model, "b": twin},
        {("a", "b"): _between(wrong, other), ("b", "a"): _between(other, wrong)},
    )
    session.add(random_ids(1, 9)).generate("a", max_new_tokens=5, do_sample=False)
    before = [layer.keys[:, :, :13].clone() for layer in session._sides["a"].cache.layers]
    session.add(random_ids(1, 4, seed=1)).generate("b", max_new_tokens=5, do_sample=False)
    session.add(random_ids(1, 4, seed=2)).generate("a", max_new_tokens=5, do_sample=False)
    after = session._sides["a"].cache.layers
    assert all(torch.equal(one, layer.keys[:, :, :13]) for one, layer in zip(before, after, strict=True))
    assert session.native_spans("b")[0] == (0, 4)  # its first tokens


def _between(source, target):
    return replace(source, target=target.source)


def test_a_pair_without_a_translator_reads_for_itself():
    model = tiny_model("llama")
    session = HandoffSession({"a": model, "b": copy.deepcopy(model)}, {})
    mine, alone = converse(session, model, "abab")
    assert torch.equal(mine, alone)
    assert sum(turn.translated for turn in session.turns) == 0


def test_a_failure_leaves_the_conversation_as_it_was():
    session, model = equals()
    converse(session, model, "ab")
    before, spans = session.input_ids.clone(), session.native_spans("a")
    session.add(random_ids(1, 4, seed=9))

    def stop(*_):
        raise KeyboardInterrupt

    handle = session._sides["a"].model.lm_head.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        session.generate("a", max_new_tokens=3)
    handle.remove()
    assert torch.equal(session.input_ids[:, : before.shape[1]], before) and session.native_spans("a") == spans
    session.generate("a", max_new_tokens=3, do_sample=False)
    assert torch.equal(session.input_ids, generate(model, session.input_ids[:, :-3], max_new_tokens=3))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3n"])
def test_what_a_model_read_itself_for_want_of_a_translation_is_handed_on(family):
    """From a to b translation fails, and c takes from b alone."""
    model = tiny_model(family)
    models, translator = {name: copy.deepcopy(model) for name in "abc"}, identity_translator(model)
    small = {role: torch.full((len(translator.keys),), 1e-6) for role in ("keys", "values")}
    session = HandoffSession(models, {("a", "b"): replace(translator, reach=small), ("b", "c"): translator}, on_error="prefill")
    with pytest.warns(HandOffWarning, match="100 times as large") as caught:
        mine, alone = converse(session, model, "abcbc")
    assert torch.equal(mine, alone)
    assert len([one for one in caught if issubclass(one.category, HandOffWarning)]) == 1
    first, b, c = session.turns[:3]
    whole = first.read + first.generated - 1  # of what a said, it has not read the last token
    assert (b.translated, b.prefilled) == (0, whole) and b.read > 0 and b.switch_seconds > 0
    assert session.native_spans("b")[:2] == [(0, 4), (4, whole)]
    assert c.translated == whole + b.read + b.generated - 1 - 4 and c.prefilled == 4


def test_a_failed_translation_ends_the_turn_where_that_is_asked_for():
    session, model = equals()
    small = {role: torch.full((3,), 1e-6) for role in ("keys", "values")}
    session._translators["a", "b"] = replace(session._translators["a", "b"], reach=small)
    converse(session, model, "a")
    before = session.add(random_ids(1, 4, seed=9)).input_ids.clone()
    with pytest.raises(HandOffError, match="Target layer 0: translated keys are more than 100 times"):
        session.generate("b", max_new_tokens=3)
    assert torch.equal(session.input_ids, before) and session.native_spans("b") == []
    session.generate("a", max_new_tokens=3, do_sample=False)
    assert torch.equal(session.input_ids, generate(model, before, max_new_tokens=3))


@pytest.mark.parametrize("how", ["cpu", "dispatch"])
@pytest.mark.parametrize("family", ["llama", "gemma3n"])
def test_offloaded_models(how, family):
    model, cpu = tiny_model(family), torch.device("cpu")
    models = {name: copy.deepcopy(model) for name in "ab"}
    if how == "cpu":
        accelerate.cpu_offload(models["b"], execution_device=cpu)
    else:
        layers = {f"model.layers.{i}": "cpu" for i in range(model.config.num_hidden_layers)}
        rest = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
        skipped = {"skip_keys": model._skip_keys_device_placement, "force_hooks": True}  # as from_pretrained does
        accelerate.dispatch_model(models["b"], {**layers, **rest, "lm_head": "cpu"}, main_device="cpu", **skipped)
        assert models["b"].hf_device_map
    translator = identity_translator(model)
    session = HandoffSession(models, {("a", "b"): translator, ("b", "a"): translator})
    mine, alone = converse(session, model, "abab")
    assert torch.equal(mine, alone) and all(turn.translated for turn in session.turns[1:])


def test_a_fork_goes_on_by_itself():
    session, model = equals()
    converse(session, model, "ab")
    known = session.input_ids.clone()
    for seed in (3, 4):
        fork = session.fork().add(random_ids(1, 5, seed=seed))
        fork.generate("a", max_new_tokens=4, do_sample=False)
        assert torch.equal(fork.input_ids, generate(model, torch.cat([known, random_ids(1, 5, seed=seed)], 1), max_new_tokens=4))
    assert torch.equal(session.input_ids, known) and len(session.turns) == 2


def test_rewinding():
    session, model = equals()
    converse(session, model, "abab")
    kept = session.input_ids[:, :15].clone()
    session.rewind(15).add(random_ids(1, 4, seed=5))
    session.generate("b", max_new_tokens=6, do_sample=False)
    wanted = generate(model, torch.cat([kept, random_ids(1, 4, seed=5)], 1), max_new_tokens=6)
    assert torch.equal(session.input_ids, wanted)
    with pytest.raises(HandOffError, match="cannot stay"):
        session.rewind(1000)


def test_wrong_use_is_refused():
    session, model = equals()
    with pytest.raises(HandOffError, match="empty"):
        session.generate("a")
    with pytest.raises(HandOffError, match="No model 'z'"):
        session.add(random_ids(1, 3)).generate("z")
    with pytest.raises(HandOffError, match="one conversation"):
        session.add(random_ids(2, 3))
    with pytest.raises(HandOffError, match="num_beams"):
        session.generate("a", num_beams=2)
    with pytest.raises(HandOffError, match="needs a model 'b'"):
        HandoffSession({"a": model}, {("a", "b"): identity_translator(model)})
    with pytest.raises(HandOffError, match="recompute_last"):
        HandoffSession({"a": model}, {}, recompute_last="all")
    for other, error in ((tiny_model("llama", seed=4), IdentityError), (tiny_model("llama", num_hidden_layers=2), GeometryError)):
        with pytest.raises(error):
            HandoffSession({"a": model, "b": other}, {("a", "b"): identity_translator(model)})


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def test_a_template_that_renders_the_history_differently_is_named(examples):
    tokenizer = AutoTokenizer.from_pretrained(examples / "models" / "qwen3-large")
    tokenizer.chat_template = TEMPLATE
    model = tiny_model("llama", vocab_size=len(tokenizer))
    other = copy.deepcopy(tokenizer)
    other.chat_template = TEMPLATE.replace("[{{", "<{{").replace("}}]", "}}>")
    translator = identity_translator(model)
    session = HandoffSession(
        {"a": model, "b": copy.deepcopy(model)},
        {("a", "b"): translator, ("b", "a"): translator},
        tokenizers={"a": tokenizer, "b": other},
    )
    messages = [{"role": "user", "content": "What is a cache?"}]
    answer = session.chat("a", messages, max_new_tokens=4, do_sample=False)
    assert isinstance(answer, str)
    known = session.input_ids.clone()
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And a key?"}]
    with pytest.raises(HandOffError, match="'b' renders the conversation differently from token 0"):
        session.chat("b", messages, max_new_tokens=4)
    assert torch.equal(session.input_ids, known)
    with pytest.raises(HandOffError, match="needs a tokenizer"):
        HandoffSession({"a": model}, {}).chat("a", messages)


def test_chat_goes_on_where_the_template_agrees(examples):
    tokenizer = AutoTokenizer.from_pretrained(examples / "models" / "qwen3-large")
    tokenizer.chat_template = TEMPLATE
    model = tiny_model("llama", vocab_size=len(tokenizer))
    translator = identity_translator(model)
    names = {"a": model, "b": copy.deepcopy(model)}
    session = HandoffSession(names, {("a", "b"): translator, ("b", "a"): translator}, tokenizers=dict.fromkeys(names, tokenizer))
    # An answer whose ids a tokenizer gives back for its text, as those of trained models mostly are.
    answer = tokenizer("a place for states\n", return_tensors="pt").input_ids
    messages = [{"role": "user", "content": "What is a cache?"}]
    session.chat("a", messages, max_new_tokens=1, do_sample=False)
    session.rewind(session.input_ids.shape[1] - 1).add(answer)
    messages += [{"role": "assistant", "content": "a place for states"}, {"role": "user", "content": "And a key?"}]
    session.chat("b", messages, max_new_tokens=3, do_sample=False)
    assert session.turns[-1].model == "b" and session.turns[-1].translated > 0
