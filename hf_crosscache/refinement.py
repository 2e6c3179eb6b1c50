"""Refinement: distil the target's own predictions into a translator's maps; support and serving cost stay as they are."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, reduce
from tqdm.auto import tqdm

from .artefact import tensors_of
from .calibration import Calibration
from .distillation import Distillation, HeldOut
from .errors import CalibrationError
from .translator import CacheTranslator

PROGRESS = "refinement.pt"
_HELD_OUT = 64  # windows that choose the learning rate and the end
_PILOT = 0.06  # of the steps, for each learning rate that is tried
_CHECKS = 10  # looks at the held-out windows
_PATIENCE = 2  # of them without a gain, before the best maps go on at a third of the learning rate
_DROPS = 2  # of the learning rate, before the run ends
_WARM_UP = 20  # steps
_LAST = 0.03  # of the learning rate, at the end
_LONG = 8  # times the least context, from where on contexts of two lengths are looked at
_CLIP = 1.0  # norm of the gradient


@dataclass(frozen=True)
class Refinement:
    """How to refine.

    steps: of the optimiser, each on batch_size windows, of all processes together.
    learning_rates: Adam's, in units of the spread of inputs and outputs; each is tried for some steps, and the one that does best on
        held-out windows stays.
    continuation: at most so many tokens behind a context are predicted.
    least_context: a context ends at random, from here to the window's end less the continuation; as many contexts between 100 and 200
        tokens as between 1,000 and 2,000, where windows are that long.
    attention_error: how much the relative square error of the target's attention outputs counts beside the KL.
    minutes: the learning rate comes down, and the run ends, after so long at the latest; None for no limit.
    """

    steps: int = 1000
    batch_size: int = 32
    learning_rates: Sequence[float] = (3e-4, 1e-3, 3e-3)
    continuation: int = 128
    least_context: int = 64
    attention_error: float = 0.0
    minutes: float | None = None
    seed: int = 0


def refine_translator(
    translator: CacheTranslator, calibration: Calibration, settings: Refinement | None = None, *, folder: str | Path | None = None
) -> CacheTranslator:
    """Train a translator's maps so that the target predicts from a translated context what it predicts from its own.

    The loss is KL(native || translated) of the target's next-token distributions over a continuation, in the setting that is served:
    first tokens and native layers the target's own, all between translated, contexts of random length. Both models are frozen; the maps'
    master weights are float32, their products run in the target's dtype. Held-out windows choose the learning rate and the end, and
    the best maps seen on them are returned: those given, where none did better.

    Under `accelerate launch` every process takes its share of each batch.

    Args:
        translator: as `fit_translator`, or another refinement, returned it.
        calibration: of the same models, with the translator's native_layers.
        folder: where progress is kept, to be taken up again by the same call; None keeps none. Progress of other maps, texts or settings
            than these is left aside, and written over.

    Returns:
        A translator on the CPU of the same support; `summary["refined"]` says how it came about, and what it gained on held-out windows. An
        evaluation that the summary held of the maps before is left out.

    Raises:
        GeometryError, IdentityError: the models are not the translator's.
        CalibrationError: the calibration has other native layers, or windows too short for a context and a continuation.
    """
    settings = settings or Refinement()
    translator.check(source_model=calibration.source_model, target_model=calibration.target_model)
    if calibration.native_layers != translator.native_layers:
        raise CalibrationError(f"The translator has native_layers = {translator.native_layers}, Calibration {calibration.native_layers}.")
    if calibration.window < settings.least_context + 2 or settings.least_context <= calibration.sink_tokens:
        raise CalibrationError(
            f"least_context = {settings.least_context}: more than sink_tokens = {calibration.sink_tokens} and less than the windows' "
            f"{calibration.window} tokens expected."
        )
    distillation = Distillation(translator, calibration, settings.attention_error)
    return _Trainer(distillation, calibration, settings, folder and Path(folder) / PROGRESS).run(translator)


class _Trainer:
    """Pilots of each learning rate, then the run itself."""

    def __init__(self, distillation: Distillation, calibration: Calibration, settings: Refinement, progress: Path | str | None) -> None:
        self.distillation, self.maps, self.settings = distillation, distillation.maps, settings
        self.windows = calibration.windows["fit"]
        self.held_out = calibration.windows["validation"][:_HELD_OUT]
        self.longest = max(settings.least_context, calibration.window - settings.continuation)
        self.progress = None if not progress else Path(progress)
        self.processes = PartialState()
        self.begun = _fingerprint(distillation.maps.translator, calibration, settings)

    def run(self, translator: CacheTranslator) -> CacheTranslator:
        started = time.perf_counter()
        before = self.check()
        known = self._taken_up()
        pilots = known["pilots"] if known else self._pilots()
        rate = min(pilots, key=lambda rate: pilots[rate])
        start = before if known or len(pilots) == 1 else self.check()  # the maps of the best pilot, where it was any good
        best, after, steps = self._train(rate, self.settings.steps, start, pilots, known, started)
        self.maps.load_state_dict(best)
        entry = {
            "steps": steps,
            "batch_size": self.settings.batch_size,
            "learning_rate": rate,
            "pilots": {f"{rate:g}": kl for rate, kl in pilots.items()},
            "processes": self.processes.num_processes,
            "seconds": round(time.perf_counter() - started, 1),
            "held_out": {"windows": len(self.held_out), "before": asdict(before), "after": asdict(after)},
        }
        refined = self.maps.to_translator()
        summary = {name: figures for name, figures in refined.summary.items() if name != "evaluation"}  # which was of other maps
        return replace(refined, summary={**summary, "refined": entry})

    def check(self) -> HeldOut:
        """Look at the held-out windows, with contexts as long as they come; the mean with those of middling length, where these differ."""
        shorter = round(math.sqrt(self.settings.least_context * self.longest))
        contexts = (self.longest,) if self.longest < _LONG * self.settings.least_context else (shorter, self.longest)
        found = [self.distillation.check(self.held_out, context) for context in contexts]
        kl, recovered = (sum(figures) / len(found) for figures in zip(*((f.kl, f.context_recovered) for f in found), strict=True))
        return HeldOut(*self._agreed(kl, recovered))

    def _pilots(self) -> dict[float, float]:
        """Learning rate -> held-out KL after a few steps with it. The maps are left as the best of them has made them."""
        rates = list(self.settings.learning_rates)
        if len(rates) == 1:
            return {rates[0]: 0.0}
        steps, found = max(1, round(_PILOT * self.settings.steps)), {}
        start = best = copy.deepcopy(self.maps.state_dict())
        least = self.check().kl
        for rate in rates:
            optimizer = self._optimizer(rate)
            for step in tqdm(range(steps), desc=f"try learning rate {rate:g}", unit="step"):
                self._step(optimizer, rate, step, step / steps)
            found[rate] = self.check().kl
            if found[rate] < least:
                best, least = copy.deepcopy(self.maps.state_dict()), found[rate]
            self.maps.load_state_dict(start)
        self.maps.load_state_dict(best)
        return {rate: kl if math.isfinite(kl) else math.inf for rate, kl in found.items()}

    def _train(
        self, rate: float, steps: int, before: HeldOut, pilots: dict[float, float], known: dict[str, Any] | None, started: float
    ) -> tuple[dict[str, torch.Tensor], HeldOut, int]:
        """Return the best maps seen, what they keep of held-out windows, and how many steps were taken."""
        optimizer = self._optimizer(rate)
        best, kept, first, worse, drops, spent = copy.deepcopy(self.maps.state_dict()), before, 0, 0, 0, 0.0
        if known:
            self.maps.load_state_dict(known["maps"])
            optimizer.load_state_dict(known["optimizer"])
            best, kept, first, spent = known["best"], HeldOut(**known["kept"]), known["step"], known["spent"]
            worse, drops = known["worse"], known["drops"]
        every, limit = max(1, steps // _CHECKS), self.settings.minutes
        checked = first / steps
        with tqdm(total=steps, initial=first, desc="refine", unit="step") as bar:
            for step in range(first, steps):
                share = step / steps
                if limit is not None:
                    (seconds,) = self._agreed(spent + time.perf_counter() - started)
                    share = max(share, seconds / (60 * limit))
                if share >= 1:
                    now = self.check()
                    return (self.maps.state_dict(), now, step) if now.kl < kept.kl else (best, kept, step)
                self._step(optimizer, rate / 3**drops, step, share)
                bar.update()
                done = step + 1 == steps or share + 1.5 / steps >= 1
                if not done and (share - checked < 1 / _CHECKS if limit else (step + 1) % every):
                    continue
                checked, now = share, self.check()
                bar.set_postfix(held_out_kl=f"{now.kl:.4f}", context_recovered=f"{now.context_recovered:.3f}")
                worse = worse + 1 if not now.kl < kept.kl else 0
                if now.kl < kept.kl:
                    best, kept = copy.deepcopy(self.maps.state_dict()), now
                if worse >= _PATIENCE:
                    drops, worse = drops + 1, 0
                    if drops > _DROPS:
                        return best, kept, step + 1
                    self.maps.load_state_dict(best)
                    optimizer = self._optimizer(rate)
                if self.progress is not None and self.processes.is_main_process:
                    spent_now = spent + time.perf_counter() - started
                    state = {"maps": self.maps.state_dict(), "optimizer": optimizer.state_dict(), "best": best, "kept": asdict(kept)}
                    self._keep(
                        {
                            **state,
                            "step": step + 1,
                            "worse": worse,
                            "drops": drops,
                            "pilots": pilots,
                            "spent": spent_now,
                            "begun": self.begun,
                        }
                    )
        return best, kept, steps

    def _step(self, optimizer: torch.optim.Optimizer, rate: float, step: int, share: float) -> None:
        """One step; which windows, and where their contexts end, depends on the seed and the step alone."""
        settings, world = self.settings, self.processes.num_processes
        draw = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        rows = torch.randint(len(self.windows), (settings.batch_size,), generator=draw)
        stretch = math.log((self.longest + 1) / settings.least_context) * torch.rand((), generator=draw, dtype=torch.float64)
        context = min(self.longest, int(settings.least_context * stretch.exp()))
        rows = rows[self.processes.process_index :: world]
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / _WARM_UP) * (_LAST + (1 - _LAST) * (1 + math.cos(math.pi * share)) / 2)
        loss = self.distillation.loss(self.windows[rows][:, : context + settings.continuation], context)
        loss.backward()
        parameters = list(self.maps.parameters())
        if world > 1:
            for parameter in parameters:
                parameter.grad = reduce(parameter.grad, "mean")  # type: ignore[assignment]
        if torch.nn.utils.clip_grad_norm_(parameters, _CLIP).isfinite():  # now and then a batch overflows a model's dtype
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.maps.parameters(), lr=rate, betas=(0.9, 0.99))

    def _keep(self, state: dict[str, Any]) -> None:
        if self.progress is not None:
            self.progress.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, self.progress)

    def _taken_up(self) -> dict[str, Any] | None:
        """What an earlier call has left, None where there was none."""
        if self.progress is None or not self.progress.exists():
            return None
        known = torch.load(self.progress, map_location=self.distillation.device, weights_only=True)
        return known if known.get("begun") == self.begun else None

    def _agreed(self, *figures: float) -> tuple[float, ...]:
        """The main process's figures, since clocks and sums differ and all processes have to decide alike."""
        if self.processes.num_processes == 1:
            return figures
        told: Any = broadcast(torch.tensor(figures, dtype=torch.float64, device=self.distillation.device))
        return tuple(told.tolist())


def _fingerprint(translator: CacheTranslator, calibration: Calibration, settings: Refinement) -> str:
    """Say what a refinement is of: translator, windows and settings, but for the time it may take."""
    digest = hashlib.sha256(repr({**asdict(settings), "learning_rates": tuple(settings.learning_rates), "minutes": None}).encode())
    for tensor in (*tensors_of(translator, torch.float32).values(), *calibration.windows.values()):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
