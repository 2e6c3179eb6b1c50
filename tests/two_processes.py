"""What each of two processes runs in test_refinement.py: a refinement with a limit of time, by clocks that differ."""

import os
import time

from builders import MODELS, TEXTS, pocket_model
from transformers import AutoTokenizer

from hf_crosscache import Calibration, Refinement, fit_translator, refine_translator, refinement


class Ahead:
    """A clock that runs twenty times as fast."""

    @staticmethod
    def perf_counter() -> float:
        return 20 * time.perf_counter()


os.environ["ACCELERATE_USE_CPU"] = "true"
tokenizer = AutoTokenizer.from_pretrained(MODELS / "qwen3-large")
calibration = Calibration(pocket_model("qwen3-small"), pocket_model("qwen3-large"), tokenizer, TEXTS, tokens=10_000, window=96)
translator = fit_translator(calibration, k=2)
if os.environ["RANK"] == "1":
    refinement.time = Ahead
settings = Refinement(steps=100_000, batch_size=2, learning_rates=(1e-3,), continuation=32, least_context=32, minutes=0.1)
refined = refine_translator(translator, calibration, settings)
print(f"refined in {refined.summary['refined']['steps']} steps", flush=True)
