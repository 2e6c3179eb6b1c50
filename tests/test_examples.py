"""Every example runs offline, fits on a screen, and stays in step with the library."""

import os
import subprocess
import sys

import pytest
from builders import EXAMPLES

SCRIPTS = {
    "quickstart.py": [],
    "fit_translator.py": ["--tokens", "30000", "--windows", "8", "--out", "{tmp}/t"],
    "hand_off_generation.py": ["{translator}"],
    "hand_off_session.py": [],
}


def test_all_examples_are_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SCRIPTS)
    assert all(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_runs(script, tmp_path, translator):
    folder = translator.save_pretrained(tmp_path / "translator")
    arguments = [a.format(tmp=tmp_path, translator=folder) for a in SCRIPTS[script]]
    run = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning:__main__", EXAMPLES / script, *arguments],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip()
