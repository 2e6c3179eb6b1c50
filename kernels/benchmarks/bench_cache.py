"""Time a switch of models as a user meets it: building a `TranslatedCache`, all Python included, and the first forward pass over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from harness import SHAPES
from transformers import AutoModelForCausalLM, DynamicCache

from hf_crosscache import CacheGeometry, CacheTranslator, TranslatedCache
from hf_crosscache.benchmark import Problem, Row, spread, versions
from hf_crosscache.compat import cache_argument
from hf_crosscache.identity import ModelIdentity
from hf_crosscache.maps import LayerMap, SourceHead
from hf_crosscache.native_states import Opening

PAIR, K, TOKENS, REPEATS = ("Qwen3-14B", "Qwen3-32B"), 4, 1024, 30


def cache_rows(device: torch.device, commit: str, tokens: int = TOKENS, repeats: int = REPEATS, **changes: int) -> Iterator[Row]:
    """Yield four rows: all layers at once, and the first forward pass of the whole target with and without translation in it.

    Args:
        changes: to the configs of both models, such as a smaller hidden size; none for the published shapes.
    """
    models = {}
    for name in PAIR:
        layers = SHAPES[name].dims[0] if name == PAIR[1] else 1
        with device:
            models[name] = AutoModelForCausalLM.from_config(SHAPES[name].build(layers, **changes), dtype=torch.bfloat16).eval()
    target = models[PAIR[1]]
    one = CacheGeometry.from_model(models[PAIR[0]])
    layers = SHAPES[PAIR[0]].dims[0]
    source_geometry = replace(one, layers=one.layers * layers, rotary=one.rotary * layers)
    target_geometry = CacheGeometry.from_model(target)
    problem = Problem(source_geometry, target_geometry, support="head", k=K, batch=1, tokens=tokens, dtype=torch.bfloat16, device=device)
    translator = random_translator(problem)
    source_cache = DynamicCache()
    for layer_idx, pair in enumerate(zip(problem.keys, problem.values, strict=True)):
        source_cache.update(*pair, layer_idx)
    ids = torch.cat((torch.arange(2, 6), torch.randint(2, 1000, (tokens - 4,)))).to(device)[None]

    def begin() -> TranslatedCache:
        return TranslatedCache(source_cache, translator, input_ids=ids, recompute_last=1)

    def filled() -> DynamicCache:
        cache = DynamicCache()
        for layer_idx, (keys, values, _) in enumerate(begin()):
            cache.update(keys, values, layer_idx)
        return cache

    @torch.no_grad()
    def step(cache) -> torch.Tensor:
        return target(ids[:, -1:], **cache_argument(cache)).logits

    def row(provider: str, times: list[float], error: float | None) -> Row:
        p20, p50, p80 = (round(value, 4) for value in spread(times))
        rate = round(problem.streamed_bytes / p50 / 1e6, 1)
        return Row("TranslatedCache", *PAIR, "head", K, 1, tokens, "bfloat16", provider, p20, p50, p80, rate, None, None, None, error,
                   *versions(device), commit)  # fmt: skip

    error = float(f"{check(problem, begin().translate()):.3g}")
    nothing = lambda: None  # noqa: E731
    both, alone = timed([(nothing, lambda _: begin().translate()), (begin, lambda cache: cache.translate())], 3 * repeats)
    yield row("construction and all layers at once", both, error)
    yield row("all layers at once", alone, error)
    difference = (step(begin()) - step(filled())).float().norm() / step(filled()).float().norm()
    native, lazy = timed([(filled, step), (begin, step)], repeats)
    yield row("first forward, native cache", native, None)
    yield row("first forward, translating lazily", lazy, float(f"{difference:.3g}"))
    native, lazy = (in_update(step, prepare, repeats) for prepare in (filled, begin))
    yield row("first forward, in update alone, native cache", native, None)
    yield row("first forward, in update alone, translating lazily", lazy, float(f"{difference:.3g}"))


def in_update(step: Callable[[DynamicCache], object], prepare: Callable[[], DynamicCache], repeats: int) -> list[float]:
    """Milliseconds that a forward pass spends in `cache.update`, all layers together: what a cache adds, without the pass's own noise."""
    times = []
    for _ in range(repeats + 3):
        cache = prepare()
        update, spent = cache.update, 0.0

        def timed_update(*args, update=update, **kwargs):
            nonlocal spent
            start = time.perf_counter()
            states = update(*args, **kwargs)
            spent += time.perf_counter() - start
            return states

        cache.update = timed_update
        synchronise()
        step(cache)
        synchronise()
        times.append(1000 * spent)
    return times[3:]


def timed(runs: list[tuple[Callable[[], object], Callable[[object], object]]], repeats: int) -> list[list[float]]:
    """Wall times in milliseconds of some (preparation, call) pairs by turns, each around a call that is synchronised before and after."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 3):
        for (prepare, run), mine in zip(runs, times, strict=True):
            prepared = prepare()
            synchronise()
            start = time.perf_counter()
            run(prepared)
            synchronise()
            mine.append(1000 * (time.perf_counter() - start))
    return [mine[3:] for mine in times]


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check(problem: Problem, cache: TranslatedCache) -> float:
    """Hold some layers of a translated cache against the float64 oracle of the problem."""
    problem.out.fill_(float("nan"))
    problem.translate()
    worst = 0.0
    for layer_idx, (keys, values, _) in enumerate(cache):
        for role, states in enumerate((keys, values)):
            want = problem.out[role, layer_idx, :, :, 4:-1].float()
            worst = max(worst, ((states[:, :, 4:].float() - want).norm() / want.norm()).item())
    if not worst < 1e-6:
        raise SystemExit(f"The cache differs from the kernel by {worst:.2g}")
    return max(problem.relative_error(layer) for layer in (0, len(problem.target) // 2, len(problem.target) - 1))


def random_translator(problem: Problem) -> CacheTranslator:
    """The random maps of a problem as a translator, with constants for an opening of four tokens."""
    maps = []
    for role, weights in enumerate(problem.weights):
        maps.append(
            tuple(
                LayerMap(
                    tuple(tuple(SourceHead(*read) for read in group) for group in problem.blocks[n, role].tolist()),
                    weights[n].float(),
                    torch.zeros(problem.blocks.shape[2], weights.shape[2], device=problem.device),
                    problem.bias[n, role],
                )
                for n in range(len(problem.target))
            )
        )
    sides = [ModelIdentity(name, geometry, "", None) for name, geometry in zip(PAIR, (problem.source, problem.target), strict=True)]
    first = [tuple(states[:, :, :4].clone() for states in side) for side in problem.out.nan_to_num(0.5)]
    return CacheTranslator(*sides, *maps, sink_tokens=4, opening=Opening((2, 3, 4, 5), *first))
