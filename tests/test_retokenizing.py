"""Two tokenizers over one text, end to end: no text leaks backwards, one tokenizer twice changes nothing, a context crosses families."""

from dataclasses import replace

import pytest
import torch
from builders import MODELS, TEXTS, a_model, identity_translator, pocket_model
from small_tokenizers import pocket
from transformers import AutoTokenizer, DynamicCache

from hf_crosscache import CacheTranslator, Calibration, TranslatedCache, evaluate_translator, fit_translator
from hf_crosscache.alignment import OverlapWeights, TokenAlignment
from hf_crosscache.cli import main
from hf_crosscache.compat import cache_argument, prefill, states_of
from hf_crosscache.distillation import Distillation
from hf_crosscache.errors import AlignmentError, HandOffError, IdentityError
from hf_crosscache.refinement import Refinement, refine_translator
from hf_crosscache.retokenizing import Retokenizer

TEXT = "Statistics are gathered by the collector, which may be turned off; see chapter 12 for the 3 settings. It reports twice. "


@pytest.fixture(scope="module")
def across():
    """Gemma 3 reads, Llama answers: other tokenizer, BOS on one side only, sliding windows at the source."""
    source, target = pocket_model("gemma3"), pocket_model("llama")
    tokenizer, source_tokenizer = (AutoTokenizer.from_pretrained(MODELS / name) for name in ("llama", "gemma3"))
    calibration = Calibration(source, target, tokenizer, TEXTS, source_tokenizer=source_tokenizer, tokens=60_000, window=192)
    return calibration, fit_translator(calibration, k=4), source_tokenizer


def test_every_target_token_is_paired_with_the_last_source_token_that_has_read_no_further():
    retokenizer = Retokenizer(pocket("llama"), pocket("gemma3"))
    one, other = (pocket("llama")(text)["input_ids"] for text in (TEXT, TEXT[::-1] + TEXT))
    ids = torch.tensor([one, other[: len(one)]])
    tokens = retokenizer(ids)
    for row in range(2):
        real = tokens.ids[row][tokens.attention_mask[row] == 1]
        padding = tokens.ids.shape[1] - len(real)
        for at, index in enumerate(tokens.alignment.source_index[row].tolist()):
            heard = pocket("gemma3").decode(real[1 : index - padding + 1])
            told = pocket("llama").decode(ids[row, : at + 1])
            assert told.startswith(heard)
            if index - padding + 1 < len(real) and tokens.alignment.translated[row, at]:
                assert not told.startswith(pocket("gemma3").decode(real[1 : index - padding + 2]))


def test_what_follows_a_token_does_not_reach_its_state(across):
    calibration, translator, source_tokenizer = across
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "llama")
    retokenizer = Retokenizer(tokenizer, source_tokenizer)
    one, other = (tokenizer(TEXT + end, return_tensors="pt")["input_ids"] for end in ("The end of it.", "Quite another one!"))
    shared = int((one[0, : min(one.shape[1], other.shape[1])] == other[0, : min(one.shape[1], other.shape[1])]).long().cumprod(0).sum())
    built = []
    for ids in (one, other):
        tokens = retokenizer(ids)
        cache, _ = prefill(calibration.source_model, tokens.ids, attention_mask=tokens.attention_mask)
        given = {"target_model": calibration.target_model, "input_ids": ids, "alignment": tokens.alignment, "recompute_last": 1}
        built.append(states_of(TranslatedCache(cache, translator, **given).to_dynamic_cache()))
    for (keys, values), (others_keys, others_values) in zip(*built, strict=True):
        torch.testing.assert_close(keys[:, :, : shared - 1], others_keys[:, :, : shared - 1])
        torch.testing.assert_close(values[:, :, : shared - 1], others_values[:, :, : shared - 1])


def test_one_tokenizer_twice_changes_nothing():
    model, translator = a_model("llama")
    ids = torch.randint(1, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    cache, _ = prefill(model, ids)
    slots = torch.arange(20).expand(2, -1)
    empty = torch.empty(0, dtype=torch.long)
    alignment = TokenAlignment(slots, slots, slots, torch.ones(2, 20, dtype=torch.bool), OverlapWeights(empty, empty, empty, empty.float()))
    plain, aligned = (
        TranslatedCache(cache, translator, target_model=model, input_ids=ids, recompute_last=3, alignment=given).to_dynamic_cache()
        for given in (None, alignment)
    )
    for pair, other in zip(states_of(plain), states_of(aligned), strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


def test_keys_move_from_the_sources_position_to_the_targets():
    """The source reads a text behind a prefix that the target does not have: self-translated, it is as if the target had read it alone."""
    model, _ = a_model("llama")
    translator = identity_translator(model)
    ids = torch.randint(1, 250, (1, 24), generator=torch.Generator().manual_seed(1))
    shifted = torch.arange(24)[None] + 7
    cache = DynamicCache()
    model(ids, position_ids=shifted, use_cache=True, **cache_argument(cache))  # attention sees distances alone: the same states, turned
    slots, empty = torch.arange(24)[None], torch.empty(0, dtype=torch.long)
    translated = torch.ones(1, 24, dtype=torch.bool)
    alignment = TokenAlignment(slots, shifted, slots, translated, OverlapWeights(empty, empty, empty, empty.float()))
    found = TranslatedCache(cache, translator, target_model=model, input_ids=ids, alignment=alignment, recompute_last=1).to_dynamic_cache()
    native, _ = prefill(model, ids[:, :23])
    for pair, other in zip(states_of(native), states_of(found), strict=True):
        torch.testing.assert_close(pair[0], other[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(pair[1], other[1], atol=1e-4, rtol=1e-3)


def test_a_context_crosses_tokenizers_and_families(across, tmp_path):
    calibration, translator, source_tokenizer = across
    assert translator.two_tokenizers
    translator.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "llama")
    models = calibration.source_model, calibration.target_model
    found = CacheTranslator.from_pretrained(tmp_path)
    given = {"source_tokenizer": source_tokenizer, "windows": 24, "context_tokens": 128, "continuation_tokens": 64}
    evaluation = evaluate_translator(found, *models, tokenizer, TEXTS, **given)
    assert evaluation["translated"].context_recovered > 0.25 and abs(evaluation["wrong_document"].context_recovered) < 0.2
    assert evaluation["translated"].gap_recovered is None and "source" not in {arm.arm for arm in evaluation.arms}
    settings = Refinement(steps=6, batch_size=4, learning_rates=(1e-3,), continuation=48, least_context=64)
    refined = refine_translator(found, calibration, settings).summary["refined"]["held_out"]
    assert refined["after"]["kl"] < refined["before"]["kl"]


def test_nothing_but_the_context_is_missed_where_it_is_left_out():
    """A Gemma without its BOS predicts badly: that is not the context's doing, so the floor has one, and the control stays near it."""
    names = ("llama", "gemma3")
    tokenizers = [AutoTokenizer.from_pretrained(MODELS / name) for name in names]
    models = [pocket_model(name) for name in names]
    calibration = Calibration(*models, tokenizers[1], TEXTS, source_tokenizer=tokenizers[0], tokens=40_000, window=192)
    translator = fit_translator(calibration, k=4)
    given = {"source_tokenizer": tokenizers[0], "windows": 24, "context_tokens": 128, "continuation_tokens": 64}
    evaluation = evaluate_translator(translator, *models, tokenizers[1], TEXTS, **given)
    assert evaluation["translated"].context_recovered > 0.2 and abs(evaluation["wrong_document"].context_recovered) < 0.15
    here = Distillation(translator, calibration).check(calibration.windows["validation"][:8], 128)
    assert here.context_recovered < 0.6


def test_generate_goes_on_from_another_tokenizers_reading(across):
    calibration, translator, source_tokenizer = across
    source, target = calibration.source_model, calibration.target_model
    prompt = AutoTokenizer.from_pretrained(MODELS / "llama")(TEXT, return_tensors="pt")
    tokens = Retokenizer(AutoTokenizer.from_pretrained(MODELS / "llama"), source_tokenizer)(prompt.input_ids)
    cache, _ = prefill(source, tokens.ids, attention_mask=tokens.attention_mask)
    hand_off = TranslatedCache(cache, translator, target_model=target, input_ids=prompt.input_ids, alignment=tokens.alignment)
    assert hand_off.get_seq_length() == prompt.input_ids.shape[1] - 1
    written = target.generate(**prompt, max_new_tokens=4, do_sample=False, **cache_argument(hand_off))
    assert written.shape[1] == prompt.input_ids.shape[1] + 4


def test_what_the_source_has_read_is_aligned_as_it_was_read(across):
    _, _, source_tokenizer = across
    retokenizer = Retokenizer(pocket("llama"), source_tokenizer)
    ids = pocket("llama")(TEXT, return_tensors="pt")["input_ids"]
    tokens = retokenizer(ids)
    assert torch.equal(retokenizer.align(tokens.ids, ids).source_index, tokens.alignment.source_index)
    padded, mask = (torch.nn.functional.pad(given, (3, 0)) for given in (tokens.ids, tokens.attention_mask))
    behind = retokenizer.align(padded, ids, mask)
    assert torch.equal(behind.source_index[behind.source_index >= 0], tokens.alignment.source_index[behind.source_index >= 0] + 3)
    assert torch.equal(behind.source_position_ids, tokens.alignment.source_position_ids)
    with pytest.raises(AlignmentError, match="Row 0"):
        retokenizer.align(retokenizer(pocket("llama")("Another text.", return_tensors="pt")["input_ids"]).ids, ids)


def test_the_command_line_hands_over_between_tokenizers(across, tmp_path, capsys):
    _, translator, _ = across
    translator.save_pretrained(tmp_path)
    pair = ["--source", str(MODELS / "gemma3"), "--target", str(MODELS / "llama")]
    assert main(["generate", str(tmp_path), *pair, "--prompt", TEXT, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out
    evaluation = ["--windows", "4", "--context-tokens", "64", "--continuation-tokens", "32", "--json", str(tmp_path / "e.json")]
    assert main(["eval", str(tmp_path), *pair, "--texts", str(TEXTS), *evaluation]) == 0
    assert "translated" in capsys.readouterr().out


def test_what_does_not_line_up_is_refused(across):
    calibration, translator, source_tokenizer = across
    target, tokenizer = calibration.target_model, AutoTokenizer.from_pretrained(MODELS / "llama")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    tokens = Retokenizer(tokenizer, source_tokenizer)(ids)
    cache, _ = prefill(calibration.source_model, tokens.ids)
    with pytest.raises(HandOffError, match="different tokenizers"):
        TranslatedCache(cache, translator, target_model=target, input_ids=ids)
    short, _ = prefill(calibration.source_model, tokens.ids[:, :5])
    with pytest.raises(HandOffError, match="alignment is of 1 rows"):
        TranslatedCache(short, translator, target_model=target, input_ids=ids, alignment=tokens.alignment)
    with pytest.raises(HandOffError, match="input_ids of shape"):
        TranslatedCache(cache, translator, target_model=target, input_ids=ids[:, :5], alignment=tokens.alignment)
    with pytest.raises(IdentityError, match="source_tokenizer"):
        translator.check(tokenizer=tokenizer)
    translator.check(tokenizer=tokenizer, source_tokenizer=source_tokenizer)
    with pytest.raises(HandOffError, match="Leave the first tokens to the target"):
        TranslatedCache(cache, translator, target_model=target, input_ids=ids, alignment=replace(
            tokens.alignment, translated=tokens.alignment.translated & (torch.arange(ids.shape[1]) > 8)))  # fmt: skip
