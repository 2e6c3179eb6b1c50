"""The same problems under triton's interpreter, which has to be asked for before Python starts; and which implementation is picked."""

import re

import pytest
import torch
from hf_crosscache_kernels import backend_for
from hf_crosscache_kernels._launch import has_triton

if torch.cuda.is_available():
    pytest.skip("the kernels run on the device itself", allow_module_level=True)


@pytest.mark.parametrize("name", ["test_translate.py", "test_moments.py"])
def test_the_kernels_solve_their_problems_interpreted(name, interpreted):
    done = interpreted(name)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 10, done.stdout[-2000:]


def test_the_device_decides_and_the_variable_forces(monkeypatch):
    monkeypatch.delenv("HF_CROSSCACHE_BACKEND", raising=False)
    assert backend_for(torch.device("cpu")) == "reference"
    assert backend_for(torch.device("cuda")) == ("triton" if has_triton() else "reference")
    monkeypatch.setenv("HF_CROSSCACHE_BACKEND", "reference")
    assert backend_for(torch.device("cuda")) == "reference"
    monkeypatch.setenv("HF_CROSSCACHE_BACKEND", "fast")
    with pytest.raises(RuntimeError, match="'reference', 'triton' or unset, not 'fast'"):
        backend_for(torch.device("cpu"))


def test_triton_that_cannot_run_is_said(monkeypatch):
    monkeypatch.setenv("HF_CROSSCACHE_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 before Python starts" if has_triton() else "Unset it"):
        backend_for(torch.device("cpu"))


def test_a_missing_or_old_triton_falls_back(monkeypatch):
    monkeypatch.delenv("HF_CROSSCACHE_BACKEND", raising=False)
    monkeypatch.setattr("hf_crosscache_kernels._launch.has_triton", lambda: False)
    assert backend_for(torch.device("cuda")) == "reference"
