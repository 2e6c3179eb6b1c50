"""The page says what the survey says, needs nothing but itself, and takes any name. No model is run."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from hf_crosscache.attention_cosine import AttentionCosine
from hf_crosscache.evaluation import Arm, Evaluation
from hf_crosscache.geometry import CacheGeometry, LayerGeometry
from hf_crosscache.html_report import html_report, verdict
from hf_crosscache.identity import ModelIdentity
from hf_crosscache.maps import LayerMap, SourceHead
from hf_crosscache.rope import RotaryTable
from hf_crosscache.survey import Survey
from hf_crosscache.translator import CacheTranslator

VOID = {"meta", "br", "link"}


def identity(name, layers, heads):
    layer = LayerGeometry(heads, 4, "full_attention", None, 4)
    rotary = RotaryTable(torch.tensor([1.0, 0.1]), 1.0, False)
    return ModelIdentity(name, CacheGeometry("qwen2", (layer,) * layers, (rotary,) * layers), "w", "t")


def a_translator(source=("small", 3, 2), target=("large", 4, 2), k=2, summary=None):
    torch.manual_seed(0)
    source, target = identity(*source), identity(*target)
    layers, heads = len(target.geometry), target.geometry.layers[0].num_key_value_heads
    every = [
        SourceHead(layer, head) for layer in range(len(source.geometry)) for head in range(source.geometry.layers[0].num_key_value_heads)
    ]

    def maps():
        blocks = (
            tuple(tuple(every[at] for at in torch.randperm(len(every))[:k].sort().values) for _ in range(heads)) for _ in range(layers)
        )
        return tuple(LayerMap(b, torch.zeros(heads, 4 * k, 4), torch.zeros(heads, 4 * k), torch.zeros(heads, 4)) for b in blocks)

    summary = {"support": "head", "k": k, "tokens": 760000, "fit_seconds": 31.5, "r2": {"keys": 0.8, "values": 0.7}, **(summary or {})}
    r2 = {role: 0.3 + 0.7 * torch.rand(layers, heads) for role in ("keys", "values")}
    return CacheTranslator(source, target, maps(), maps(), r2=r2, summary=summary)


def arm(name, nll, context, gap, n=64):
    def figure(value):
        return (None, None, None) if value is None else (value, value - 0.0211, value + 0.0233)

    return Arm(name, n, *figure(nll), *figure(0.25), *figure(0.75), *figure(context), *figure(gap))


def evaluation(context=0.731, gap=0.42, context_tokens=384, recompute_last=0):
    arms = [arm("native", 2.1, 1.0, 1.0), arm("none", 2.9, 0.0, -1.2), arm("source", 2.5, 0.5, 0.0)]
    arms += [arm("translated", 2.3, context, gap), arm("wrong_document", 2.96, -0.08, -1.4)]
    return Evaluation(tuple(arms), context_tokens, 128, 4, recompute_last)


def a_survey(translator=None, main=None, **changes):
    translator = a_translator() if translator is None else translator
    main = evaluation() if main is None else main
    shape = len(translator.target.geometry), 3 * translator.target.geometry.layers[0].num_key_value_heads
    cosine = AttentionCosine(0.7 + 0.3 * torch.rand(shape), 0.6 + 0.4 * torch.rand(shape), torch.full(shape, 0.515), 32)
    found = {
        "by_recompute_last": (main, *(evaluation(0.731 + 0.02 * i, recompute_last=4**i) for i in (1, 2, 3))),
        "by_context_tokens": tuple(evaluation(context_tokens=length) for length in (128, 256, 384, 1024)),
        "not_measured": {4096: "the test documents hold only 3 windows so long"},
        "attention": cosine,
        "setting": {"device": "CPU"},
        "size_mb": 12.6,
    }
    return Survey(translator, main, **{**found, **changes})


class Page(HTMLParser):
    """Parses strictly enough: every tag that opens is closed, in order; collects text and the titles of marks."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.titles, self.tags = [], [], [], []
        self.feed(page)
        assert not self.open
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            self.titles.append(data)
        elif "style" not in self.open:
            self.words.append(data)


def test_the_page_needs_nothing_but_itself():
    page = html_report(a_survey())
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|src=", page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert "{{" not in page and "{%" not in page and "None" not in page and "nan" not in Page(page).text


def test_it_says_what_was_fitted_and_measured():
    text = Page(html_report(a_survey())).text
    for told in ("small → large", "qwen2, 4 layers, 2 KV heads of 4", "760,000", "31.5 s", "12.6 MB", "73.1 %", "71.0 to 75.4", "−8.0 %"):
        assert told in text, told
    assert "4,096 tokens: not measured: the test documents hold only 3 windows so long" in text
    assert "the mean is 0.515" in text and "wrong document" in text


def test_every_mark_tells_its_value():
    survey = a_survey()
    titles = Page(html_report(survey)).titles
    assert f"layer 2, KV head 1: {survey.translator.r2['keys'][2, 1]:.3f}" in titles
    assert f"layer 3, query head 5: {survey.attention.as_served[3, 5]:.3f}" in titles
    read = ", ".join(f"{block.layer}.{block.head}" for block in survey.translator.values[1].blocks[1])
    assert f"target layer 1, head 1 reads source heads {read} (layer.head)" in titles
    assert "context recovered: 73.1 % (71.0 to 75.4 %)" in titles and "gap recovered: 42.0 % (39.9 to 44.3 %)" in titles


def test_names_are_escaped():
    name = '<script>alert("1")</script> & co'
    page = html_report(a_survey(a_translator(target=(name, 4, 2), summary={name: {name: name}}), setting={"texts": name}))
    assert "<script" not in page and Page(page).text.count(name) >= 6


def test_charts_stay_within_their_frame():
    for tag, attributes in Page(html_report(a_survey(a_translator(target=("deep", 64, 8))))).tags:
        if tag == "svg":
            width, height = float(attributes["width"]), float(attributes["height"])
        for name, most in (("x", "width"), ("y", "height"), ("x2", "width"), ("cy", "height")):
            if tag in ("rect", "text", "line", "circle") and name in attributes:
                assert -1 <= float(attributes[name]) <= {"width": width, "height": height}[most]


def test_verdict_sentence():
    said = verdict(a_survey())
    assert said[0] == (
        "large keeps 73 % (95 % interval 71 to 75 %) of what the context is worth to it, "
        "and 42 % (40 to 44 %) of its advantage over small; "
        "translated from a wrong document it keeps −8 %."
    )
    assert said[1:] == ["Leaving the last 64 tokens of the context to it lifts that to 79 %."]


def test_verdict_where_the_source_does_better():
    alone = verdict(a_survey(main=evaluation(gap=-0.3)))
    assert "advantage" not in alone[0] and "None of its advantage over small survives" in alone[1] and "2.500 against 2.300" in alone[1]
    none_to_keep = verdict(a_survey(main=evaluation(gap=None), by_recompute_last=()))
    assert none_to_keep[1:] == ["On these documents small alone does better than large does natively, so there is no advantage to keep."]


def test_verdict_where_the_context_is_worth_nothing():
    worthless = Evaluation(
        (arm("native", 3.0, None, None), arm("none", 2.9, None, None), arm("translated", 2.9, None, None)), 384, 128, 4, 0
    )
    survey = a_survey(main=worthless, by_recompute_last=(worthless,), by_context_tokens=(worthless,))
    assert verdict(survey)[0].startswith("Nothing can be said: on these documents the context is worth nothing to large (3.000")
    Page(html_report(survey))


def test_later_entries_of_the_summary_are_shown():
    point = {"cost": 0.25, "context_recovered": 0.9, "gap_recovered": 0.8, "label": "two native layers"}
    added = {"native_layers": 2, "refined": {"steps": 400, "kl": 0.061}, "frontier": [point, {**point, "cost": 0.0, "label": "none"}]}
    before, after = (Page(html_report(a_survey(a_translator(summary=summary)))) for summary in (None, added))
    assert "against cost" not in before.text and "against cost" in after.text and "two native layers" in after.text
    assert "target layers run natively 2" in after.text and "refined steps 400, kl 0.061" in after.text and "25.0 %" in after.text


def test_what_could_not_be_had_is_said():
    missing = replace(a_survey(attention="Target, layer 0: no output projection."), size_mb=None)
    text = Page(html_report(replace(missing, translator=replace(missing.translator, r2={})))).text
    assert "Not measured. Target, layer 0: no output projection." in text and "MB" not in text and "R2 of" not in text


def test_points_below_the_axis_are_told():
    far = evaluation(gap=-4.0)
    series = evaluation(recompute_last=4), far, evaluation(recompute_last=16), evaluation(recompute_last=64)
    page = Page(html_report(a_survey(main=far, by_recompute_last=series, by_context_tokens=(far,))))
    assert "Points below −100 % are not drawn (gap recovered)" in page.text and "−400.0 %" in page.text
    joints = [attributes for _, attributes in page.tags if attributes.get("class") == "joint"]
    assert len(joints) == 3 + 1 + 3  # context, gap with its second point left out, wrong document


@pytest.mark.parametrize(("r2", "scale"), [(0.95, "0.9"), (-0.2, "≤ 0")])
def test_the_scale_begins_below_the_least_value(r2, scale):
    cells = {role: torch.full((4, 2), r2) for role in ("keys", "values")}
    assert f"{scale} 1 R2 of keys, mean {r2:.3f}".replace("-", "−") in Page(html_report(a_survey(replace(a_translator(), r2=cells)))).text
