"""One batch to one loss: the target's predictions behind a translated context, against those behind its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from .attention_outputs import Heard, attentions_of, listening
from .calibration import Calibration
from .compat import cache_argument, states_of
from .placement import device_of
from .states import LayerStates
from .trainable import TrainableMaps
from .translator import CacheTranslator

_UNITS = 16  # windows that say the spread of every dimension
_ROWS = 8  # windows scored at once


@dataclass(frozen=True)
class HeldOut:
    """What maps keep on held-out windows: KL(native || translated) in nats a token, and context recovered."""

    kl: float
    context_recovered: float


class Distillation:
    """A translator's two frozen models, and its maps on their way to better ones.

    Args:
        translator: where to begin.
        calibration: of its models, with its native layers.
        attention_error: how much the relative square error of attention outputs, mean over translated layers, counts beside the KL.

    Raises:
        UnsupportedModelError: attention outputs are wanted of a target that has none where they are listened for.
    """

    def __init__(self, translator: CacheTranslator, calibration: Calibration, attention_error: float = 0.0) -> None:
        self.calibration, self.sinks, self.target = calibration, calibration.sink_tokens, calibration.target_model
        self.device = device_of(self.target)
        self.panels = translator.to(self.device).panels
        paired = calibration.paired(calibration.windows["fit"][:_UNITS])
        source = self.panels.behind(paired.source, paired.hidden)
        self.maps = TrainableMaps(translator.to(self.device), source, paired.target)
        self.attention_error = attention_error
        self._attentions = attentions_of(self.target)[translator.native_layers :] if attention_error else []
        self._without_context: dict[tuple[int, int], tuple[float, float]] = {}

    def loss(self, ids: torch.Tensor, context: int) -> torch.Tensor:
        """KL(native || translated) of the target's predictions behind a context, mean over windows and positions, in nats.

        The relative error of attention outputs comes on top where it counts.

        Args:
            ids: `[B, T]` windows.
            context: how many of their tokens are translated; what the target predicts behind them counts.
        """
        source, native, own, left_out = self._read(ids, context)
        with listening(self._attentions) as targets, torch.no_grad():
            logits = self._predict(ids[:, context:], own)
        with listening(self._attentions) as heard:
            translated = self._predict(ids[:, context:], self._translated(source, native, left_out))
        loss = _divergence(logits, translated).mean()
        if self._attentions:
            loss = loss + self.attention_error * _relative_error(targets, heard)
        return loss

    @torch.no_grad()
    def check(self, windows: torch.Tensor, context: int) -> HeldOut:
        """Measure the maps as they are on some windows `[n, T]`, whose first `context` tokens are translated."""
        kl, nll = [], []
        for ids in windows.split(_ROWS):
            source, native, own, left_out = self._read(ids, context)
            logits = self._predict(ids[:, context:], own)
            translated = self._predict(ids[:, context:], self._translated(source, native, left_out))
            kl.append(_divergence(logits, translated).mean(1))
            nll.append(_nll(translated, ids[:, context:]))
        worst, best = self._bounds(windows, context)
        return HeldOut(torch.cat(kl).mean().item(), (worst - torch.cat(nll).mean().item()) / (worst - best))

    def _bounds(self, windows: torch.Tensor, context: int) -> tuple[float, float]:
        """NLL without the context, behind a BOS where there is one, and with the target's own reading of it."""
        key = (windows.data_ptr(), context)
        if key not in self._without_context:
            opening = torch.tensor(self.calibration.opening_ids, dtype=torch.long)
            alone = [torch.cat([opening.expand(len(ids), -1), ids[:, context:]], dim=1) for ids in windows.split(_ROWS)]
            worst = [_nll(self._predict(ids, DynamicCache())[:, len(opening) :], ids[:, len(opening) :]) for ids in alone]
            best = [_nll(self._predict(ids[:, context:], self._read(ids, context)[2]), ids[:, context:]) for ids in windows.split(_ROWS)]
            self._without_context[key] = torch.cat(worst).mean().item(), torch.cat(best).mean().item()
        return self._without_context[key]

    @torch.no_grad()
    def _read(
        self, ids: torch.Tensor, context: int
    ) -> tuple[LayerStates, Sequence[Sequence[torch.Tensor]], DynamicCache, torch.Tensor | None]:
        """Let both models read a context.

        Returns:
            what the source makes of it, features behind; the target's own states of it, and the cache to go on from; and `[B, T]` True for
            tokens that have no source token, None where all have.
        """
        reading = self.calibration.read(ids[:, :context])
        source = self.panels.behind(reading.source, reading.hidden)
        left_out = None if reading.translated is None else ~reading.translated
        return source, states_of(reading.target), reading.target, left_out

    def _translated(self, source: LayerStates, native: Sequence[Sequence[torch.Tensor]], left_out: torch.Tensor | None) -> DynamicCache:
        """The target's cache as it is served: first tokens, tokens left out and native layers its own; gradients flow to the maps."""
        position_ids = torch.arange(self.sinks, native[0][0].shape[2], device=self.device)[None]
        mapped = self.maps(source, position_ids, self.target.dtype)
        cache = DynamicCache()
        for layer_idx, pair in enumerate(native):
            keys, values = pair
            if layer_idx in mapped:
                keys, values = (self._served(own, states, left_out) for own, states in zip(pair, mapped[layer_idx], strict=True))
            cache.update(keys, values, layer_idx)
        return cache

    def _served(self, own: torch.Tensor, mapped: torch.Tensor, left_out: torch.Tensor | None) -> torch.Tensor:
        if left_out is not None:
            mapped = torch.where(left_out[:, None, :, None], own[:, :, self.sinks :], mapped)
        return torch.cat((own[:, :, : self.sinks], mapped), dim=2)

    def _predict(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return self.target(ids.to(self.device), use_cache=True, **cache_argument(cache)).logits


def _divergence(native: torch.Tensor, translated: torch.Tensor) -> torch.Tensor:
    """KL(native || translated) of each position, `[B, q]`."""
    reference, arm = F.log_softmax(native.float(), dim=-1), F.log_softmax(translated.float(), dim=-1)
    return F.kl_div(arm, reference, reduction="none", log_target=True).sum(-1)


def _relative_error(native: Heard, translated: Heard) -> torch.Tensor:
    """Square error of attention outputs over their square, mean over layers."""
    shares = []
    for layer_idx, outputs in native.outputs.items():
        wanted, found = outputs.float(), translated.outputs[layer_idx].to(outputs.device).float()
        shares.append((found - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12))
    return torch.stack([share.to(shares[0].device) for share in shares]).mean()


def _nll(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean NLL of all tokens but the first, `[B]`."""
    labels = ids[:, 1:].to(logits.device)
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels, reduction="none").mean(1)
