"""Texts to a translator: both models read the same token windows, and the fitter sees their pre-RoPE keys and values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .compat import prefill, states_of
from .errors import CalibrationError, IdentityError
from .fitter import Split, Support, TranslatorFitter
from .geometry import CacheGeometry, check_positions
from .identity import ModelIdentity, same_tokenizer
from .placement import device_of
from .rope import to_half_split
from .states import LayerStates, PairedStates
from .texts import enough, read_documents, token_windows
from .translator import CacheTranslator, Opening, all_layers

_LEAST_SCREENING, _MOST_SCREENING = 16_384, 65_536  # tokens that score single source heads; a quarter of the texts in between


class Calibration:
    """Two models over one set of texts: token windows, and the states that both models cache for them.

    Whole documents are held out by a digest of their content: 80 % fit, 10 % validate, 10 % are left for `evaluate_translator`.

    Args:
        source_model, target_model: in eval mode, anywhere; their caches are moved to the target's device.
        tokenizer: shared by both models.
        texts: as `read_documents` takes them: files, strings, or a dataset with a "text" field.
        source_tokenizer: the source's own tokenizer, checked to give the same ids; None where the two share one object.
        tokens: about how many tokens to fit and validate on; of a very large dataset only the first documents, some ten times as
            much text, are read.
        window: tokens of one window; positions beyond it are served by the same maps, since they see no positions.
        batch_size: windows that the models read at once.
        sink_tokens: leading positions of a window that are left out of the fit, because they are never translated.

    Raises:
        UnsupportedModelError: a model would be translated wrongly.
        IdentityError: the tokenizers differ.
        CalibrationError: the texts are too few or too short.
    """

    def __init__(
        self,
        source_model: PreTrainedModel,
        target_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        texts: str | Path | Iterable[Any],
        *,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        tokens: int = 760_000,
        window: int = 512,
        batch_size: int = 8,
        sink_tokens: int = 4,
        seed: int = 0,
    ) -> None:
        if source_tokenizer is not None and not same_tokenizer(source_tokenizer, tokenizer):
            raise IdentityError(
                "The source and the target have different tokenizers, so their caches do not line up token by token. "
                "Choose two models that share one tokenizer."
            )
        if not 0 <= sink_tokens < window:
            raise CalibrationError(f"sink_tokens = {sink_tokens} of a window of {window} tokens leaves nothing to fit.")
        self.source_model, self.target_model = source_model, target_model
        self.source = ModelIdentity.from_model(source_model, tokenizer)
        self.target = ModelIdentity.from_model(target_model, tokenizer)
        check_positions(source_model, self.source.geometry)
        check_positions(target_model, self.target.geometry)
        documents = list(enough(tokens, read_documents(texts)))
        validation = max(1, tokens // window // 9)
        sizes = {"fit": max(1, tokens // window - validation), "validation": validation}
        self.windows = {
            split: token_windows(documents, tokenizer, split=split, length=window, count=count, seed=seed) for split, count in sizes.items()
        }
        self.batch_size, self.sink_tokens, self.window = batch_size, sink_tokens, window
        self.documents = len(documents)

    @property
    def tokens(self) -> int:
        """Tokens of both splits that the fit may use."""
        return sum(windows.numel() for windows in self.windows.values())

    def states(self, description: str, tokens: int | None = None) -> Iterator[tuple[PairedStates, Split]]:
        """Yield the paired states of every batch of windows, with the split it belongs to.

        Args:
            description: what the progress bar says.
            tokens: stop after about so many tokens, the splits in proportion; None for all.
        """
        share = 1.0 if tokens is None else min(1.0, tokens / self.tokens)
        counts = {split: max(1, round(share * len(windows))) for split, windows in self.windows.items()}
        total = sum(counts.values()) * self.window
        with tqdm(total=total, desc=description, unit="tok", unit_scale=True) as bar:
            for split in ("fit", "validation"):
                for batch in self.windows[split][: counts[split]].split(self.batch_size):
                    yield self._paired(batch), split
                    bar.update(batch.numel())

    def opening(self) -> Opening | None:
        """The target's cache of the tokens that every window begins with (at most `sink_tokens`), None where they differ."""
        everything = torch.cat(list(self.windows.values()))[:, : self.sink_tokens]
        shared = (everything == everything[0]).all(0).long().cumprod(0).sum().item()
        if not shared:
            return None
        ids = everything[:1, :shared]
        cache, _ = prefill(self.target_model, ids.to(device_of(self.target_model)))
        return Opening(
            tuple(ids[0].tolist()),
            tuple(keys.cpu() for keys, _ in states_of(cache)),
            tuple(values.cpu() for _, values in states_of(cache)),
        )

    def _paired(self, batch: torch.Tensor) -> PairedStates:
        device = device_of(self.target_model)
        sides = []
        for model, identity in ((self.source_model, self.source), (self.target_model, self.target)):
            cache, _ = prefill(model, batch.to(device_of(model)))
            sides.append(layer_states(cache, identity.geometry, self.sink_tokens, device))
        return PairedStates(*sides)


def layer_states(cache: DynamicCache, geometry: CacheGeometry, skip: int, device: torch.device | str | None = None) -> LayerStates:
    """Read a cache that starts at position 0, but for its first positions: keys and values as cached, each `[B, H, T - skip, D]`.

    Keys of interleaved layers come in half-split order, in which the fit and its maps see those of every model.
    """
    keys, values = ([states[:, :, skip:].to(device) for states in side] for side in zip(*states_of(cache), strict=True))
    keys = [to_half_split(k, table.rotary_dim) if table.interleaved else k for k, table in zip(keys, geometry.rotary, strict=True)]
    position_ids = torch.arange(skip, cache.get_seq_length(), dtype=torch.int32, device=keys[0].device)[None]
    return LayerStates(keys, values, geometry.rotary, position_ids)


def fit_translator(
    calibration: Calibration,
    *,
    support: Support = "head",
    k: int = 8,
    candidates: int | None = None,
    layers_per_pass: int | None = None,
) -> CacheTranslator:
    """Fit a translator from calibration texts.

    The models read the texts once to screen source heads (a few windows), once for the joint moments. A pair whose moments do not fit
    in memory is fitted in passes over its target layers, at the cost of another reading a pass.

    Args:
        support: "head": each target head reads its k best source heads; "full": all heads of the k best source layers.
        k: how many source heads, or layers.
        candidates: blocks kept by the screening for forward selection, None for 1.5 k; k selects nothing.
        layers_per_pass: target layers fitted in one pass, None for as many as the free memory of the target's device holds.

    Returns:
        A translator on the CPU, with held-out R2 and a summary of the fit.
    """
    started = time.perf_counter()
    source, target = calibration.source.geometry, calibration.target.geometry
    plan = TranslatorFitter(source, target, support=support, k=k, candidates=candidates)
    if layers_per_pass is None:
        layers_per_pass = _layers_that_fit(plan, device_of(calibration.target_model))
    passes = [range(start, min(start + layers_per_pass, len(target))) for start in range(0, len(target), layers_per_pass)]
    fitted = []
    for number, layers in enumerate(passes, 1):
        of = f" ({number}/{len(passes)})" if len(passes) > 1 else ""
        fitter = TranslatorFitter(source, target, support=support, k=k, candidates=candidates, target_layers=layers)
        if fitter.needs_screening:
            enough = min(_MOST_SCREENING, max(_LEAST_SCREENING, calibration.tokens // 4))
            for states, split in calibration.states(f"screen{of}", enough):
                fitter.screen(states, split)
            fitter.choose_candidates()
        for states, split in calibration.states(f"fit{of}"):
            fitter.update(states, split)
        fitted.append(fitter.fit())
    return CacheTranslator(
        source=calibration.source,
        target=calibration.target,
        keys=all_layers([maps.keys for maps in fitted]),
        values=all_layers([maps.values for maps in fitted]),
        sink_tokens=calibration.sink_tokens,
        opening=calibration.opening(),
        r2={role: torch.cat([maps.r2[role] for maps in fitted]) for role in ("keys", "values")},
        reach={role: torch.cat([maps.reach[role] for maps in fitted]) for role in ("keys", "values")},
        summary={
            "support": support,
            "k": k,
            "candidates": plan.candidates,
            "alpha": [maps.alpha for maps in fitted],
            "tokens": calibration.tokens,
            "window": calibration.window,
            "windows": {split: len(windows) for split, windows in calibration.windows.items()},
            "documents": calibration.documents,
            "r2": {role: torch.cat([maps.r2[role] for maps in fitted]).mean().item() for role in ("keys", "values")},
            "fit_seconds": round(time.perf_counter() - started, 1),
            "device": torch.cuda.get_device_name() if calibration.target_model.device.type == "cuda" else "cpu",
        },
    )


def _layers_that_fit(plan: TranslatorFitter, device: torch.device) -> int:
    """Target layers whose statistics fill at most half of the free memory; the solver works beside them."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    needed = max(plan.moments_bytes().values())
    if needed <= free // 2:
        return len(plan.target)
    return max(1, len(plan.target) * (free // 2) // needed)
