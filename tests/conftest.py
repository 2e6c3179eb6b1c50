"""Fixtures: models are made once a session; uninitialised memory is NaN throughout."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from builders import EXAMPLES, MODELS, TEXTS, pocket_model
from transformers import AutoTokenizer

from hf_crosscache import Calibration, fit_translator


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def examples():
    return EXAMPLES


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def small():
    return pocket_model("qwen3-small")


@pytest.fixture(scope="session")
def large():
    return pocket_model("qwen3-large")


@pytest.fixture(scope="session")
def llama():
    return pocket_model("llama")


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "qwen3-large")


@pytest.fixture(scope="session")
def calibration(small, large, tokenizer, texts):
    return Calibration(small, large, tokenizer, texts, tokens=60_000, window=256, batch_size=16)


@pytest.fixture(scope="session")
def translator(calibration):
    """The pocket pair, fitted: qwen3-small reads, qwen3-large answers."""
    return fit_translator(calibration, k=6)
