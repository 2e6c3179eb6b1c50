"""Texts to a translator: both models read the same token windows, and the fitter sees their pre-RoPE keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .alignment import TokenAlignment
from .attention_weights import received_attention
from .compat import prefill, states_of
from .errors import CalibrationError
from .first_layers import attention_input
from .fitter import Split
from .geometry import CacheGeometry, check_positions
from .identity import ModelIdentity, same_tokenizer
from .native_states import Opening
from .panels import Panels
from .placement import device_of
from .retokenizing import Retokenizer
from .rope import to_half_split
from .states import LayerStates, PairedStates
from .texts import enough, opening_ids, read_documents, token_windows


class Calibration:
    """Two models over one set of texts: token windows, and the states that both models cache for them.

    Whole documents are held out by a digest of their content: 80 % fit, 10 % validate, 10 % are left for `evaluate_translator`.

    Args:
        source_model, target_model: in eval mode, anywhere; their caches are moved to the target's device.
        tokenizer: of the target; shared by both models where there is no other.
        texts: as `read_documents` takes them: files, strings, or a dataset with a "text" field.
        source_tokenizer: the source's own tokenizer; None where the two share one. Where it gives other ids, each target token is paired
            with the last source token that has read no more of the text.
        tokens: about how many tokens to fit and validate on; of a very large dataset only the first documents, some ten times as
            much text, are read.
        window: tokens of one window; positions beyond it are served by the same maps, since they see no positions.
        batch_size: windows that the models read at once.
        sink_tokens: leading positions of a window that are left out of the fit, because they are never translated.
        native_layers: how many of its first layers the target will run itself, whose hidden state the maps of the others read.

    Raises:
        UnsupportedModelError: a model would be translated wrongly.
        CalibrationError: the texts are too few or too short, or of two tokenizers one gives back none of them.
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
        native_layers: int = 0,
        seed: int = 0,
    ) -> None:
        if not 0 <= sink_tokens < window:
            raise CalibrationError(f"sink_tokens = {sink_tokens} of a window of {window} tokens leaves nothing to fit.")
        self.source_model, self.target_model = source_model, target_model
        shared = source_tokenizer is None or same_tokenizer(source_tokenizer, tokenizer)
        self.retokenizer = None if shared or source_tokenizer is None else Retokenizer(tokenizer, source_tokenizer)
        self.source = ModelIdentity.from_model(source_model, tokenizer if shared else source_tokenizer)
        self.target = ModelIdentity.from_model(target_model, tokenizer)
        check_positions(source_model, self.source.geometry)
        check_positions(target_model, self.target.geometry)
        documents = list(enough(tokens, read_documents(texts)))
        validation = max(1, tokens // window // 9)
        sizes = {"fit": max(1, tokens // window - validation), "validation": validation}
        self.windows = {
            split: token_windows(documents, tokenizer, split=split, length=window, count=count, seed=seed) for split, count in sizes.items()
        }
        if self.retokenizer is not None:
            self.windows = {split: self.retokenizer.readable(windows) for split, windows in self.windows.items()}
            if not all(map(len, self.windows.values())):
                raise CalibrationError("Of the texts of a split none is given back unchanged by both tokenizers: use plainer texts.")
        if not 0 <= native_layers < len(self.target.geometry):
            raise CalibrationError(
                f"native_layers = {native_layers}: 0 to {len(self.target.geometry) - 1} of the target's layers expected."
            )
        self.batch_size, self.sink_tokens, self.window, self.native_layers = batch_size, sink_tokens, window, native_layers
        self.documents, self.opening_ids = len(documents), opening_ids(tokenizer)

    @property
    def tokens(self) -> int:
        """Tokens of both splits that the fit may use."""
        return sum(windows.numel() for windows in self.windows.values())

    def states(
        self, description: str, tokens: int | None = None, panels: Panels | None = None, attention_weights: bool = False
    ) -> Iterator[tuple[PairedStates, Split]]:
        """Yield the paired states of every batch of windows, with the split it belongs to.

        Args:
            description: what the progress bar says.
            tokens: stop after about so many tokens, the splits in proportion; None for all.
            panels: to lay out as further layers of the source.
            attention_weights: whether to weigh the rows by the attention that they receive from the target's later queries.
        """
        share = 1.0 if tokens is None else min(1.0, tokens / self.tokens)
        counts = {split: max(1, round(share * len(windows))) for split, windows in self.windows.items()}
        total = sum(counts.values()) * self.window
        with tqdm(total=total, desc=description, unit="tok", unit_scale=True) as bar:
            for split in ("fit", "validation"):
                for batch in self.windows[split][: counts[split]].split(self.batch_size):
                    paired = self.paired(batch, attention_weights)
                    if panels is not None:
                        paired = replace(paired, source=panels.behind(paired.source, paired.hidden))
                    yield paired, split
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

    def read(self, ids: torch.Tensor) -> Reading:
        """Let both models read some tokens of the target's, `[B, T]`; what they make of the first `sink_tokens` of them is left out."""
        device, skip, translated = device_of(self.target_model), self.sink_tokens, None
        if self.retokenizer is None:
            cache, _ = prefill(self.source_model, ids.to(device_of(self.source_model)))
            source = layer_states(cache, self.source.geometry, skip, device)
        else:
            tokens = self.retokenizer(ids)
            on_source = device_of(self.source_model)
            cache, _ = prefill(self.source_model, tokens.ids.to(on_source), attention_mask=tokens.attention_mask.to(on_source))
            alignment = tokens.alignment.to(device)
            source = aligned_states(layer_states(cache, self.source.geometry, 0, device), alignment, skip)
            translated = alignment.translated[:, skip:]
        sees = attention_input(self.target_model, self.native_layers - 1) if self.native_layers else nullcontext([])
        with sees as seen:
            target, _ = prefill(self.target_model, ids.to(device_of(self.target_model)))
        return Reading(source, translated, target, seen[0][:, skip:].to(device) if seen else None)

    def paired(self, batch: torch.Tensor, attention_weights: bool = False) -> PairedStates:
        """The states of both models on some windows `[B, T]`, but for the first `sink_tokens`."""
        device, skip = device_of(self.target_model), self.sink_tokens
        listens = received_attention(self.target_model, self.target.geometry, skip=skip) if attention_weights else nullcontext()
        with listens as received:
            reading = self.read(batch)
        return PairedStates(
            reading.source,
            layer_states(reading.target, self.target.geometry, skip, device),
            sample_weight=None if reading.translated is None else reading.translated.float(),
            attention_weights=None if received is None else received.weights().to(device),
            hidden=reading.hidden,
        )


@dataclass(frozen=True, eq=False)
class Reading:
    """What two models make of some tokens of the target's, T of them behind its first ones.

    source: its states of each of them, `[B, H, T, D]`. translated: `[B, T]`, False for tokens that have no source token; None for all.
    target: its cache, from the first token on. hidden: `[B, T, F]` what the attention of its last native layer read, where there is one.
    """

    source: LayerStates
    translated: torch.Tensor | None
    target: DynamicCache
    hidden: torch.Tensor | None


def aligned_states(states: LayerStates, alignment: TokenAlignment, skip: int) -> LayerStates:
    """Bring a source's states `[B, H, S, D]` to the target tokens from `skip` on; keys keep the positions that they were turned to."""
    index = alignment.source_index[:, None, skip:, None].clamp_min(0)
    keys, values = ([s.gather(2, index.expand(-1, s.shape[1], -1, s.shape[3])) for s in side] for side in (states.keys, states.values))
    return LayerStates(keys, values, states.rotary, alignment.source_position_ids[:, skip:].int())


def layer_states(cache: DynamicCache, geometry: CacheGeometry, skip: int, device: torch.device | str | None = None) -> LayerStates:
    """Read a cache that starts at position 0, but for its first positions: keys and values as cached, each `[B, H, T - skip, D]`.

    Keys of interleaved layers come in half-split order, in which the fit and its maps see those of every model.
    """
    keys, values = ([states[:, :, skip:].to(device) for states in side] for side in zip(*states_of(cache), strict=True))
    keys = [to_half_split(k, table.rotary_dim) if table.interleaved else k for k, table in zip(keys, geometry.rotary, strict=True)]
    position_ids = torch.arange(skip, cache.get_seq_length(), dtype=torch.int32, device=keys[0].device)[None]
    return LayerStates(keys, values, geometry.rotary, position_ids)
