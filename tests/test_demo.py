"""The README's first command, start to end."""

import time

import pytest

from hf_crosscache import demo
from hf_crosscache.cli import main
from hf_crosscache.errors import CalibrationError


def test_the_demo_runs_offline_in_under_two_minutes(capsys):
    started = time.perf_counter()
    assert main(["demo"]) == 0
    assert time.perf_counter() - started < 120
    told = capsys.readouterr().out
    for way in ("native: the target reads", "no context", "translated: the source has read it"):
        assert way in told
    kept = int(told.split("translated context keeps ")[1].split(" %")[0])
    control = int(told.split("another document's context keeps ")[1].split(" %")[0])
    assert kept > 40 and control < 10


def test_without_the_repository_it_says_where_to_run(tmp_path):
    with pytest.raises(CalibrationError, match="in a clone of the repository"):
        demo.run(tmp_path)
