"""Where the Triton kernels run: on a CUDA device, or interpreted on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_crosscache_kernels._launch import has_triton

INTERPRET = {"TRITON_INTERPRET": "1", "HF_CROSSCACHE_BACKEND": "triton"}


@pytest.fixture
def triton_here():
    """The device that Triton kernels run on. Off CUDA they run in a process of their own: see test_interpreter.py."""
    if torch.cuda.is_available():
        return "cuda"
    if all(os.environ.get(name) == value for name, value in INTERPRET.items()):
        return "cpu"
    pytest.skip("no CUDA device, and not interpreting: test_interpreter.py runs this")


@pytest.fixture
def interpreted():
    """Run a test file of this folder in a process that interprets Triton."""
    if not has_triton():
        pytest.skip("triton is not installed")

    def run(*names: str) -> subprocess.CompletedProcess[str]:
        here = Path(__file__).parent
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(here / name) for name in names)]
        return subprocess.run(command, env={**os.environ, **INTERPRET}, capture_output=True, text=True, cwd=here.parent.parent)

    return run
