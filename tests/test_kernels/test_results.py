"""The committed timings hold what the README says of them, and the README's tables are those of the files."""

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "kernels" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import speed_table  # noqa: E402

from hf_crosscache.benchmark import FIELDS  # noqa: E402


def rows(name, **wanted):
    found = list(csv.DictReader((BENCHMARKS / "results" / name).open()))
    assert tuple(found[0]) == FIELDS
    return [row for row in found if all(row[key] == str(value) for key, value in wanted.items())]


LARGE = {"source": "Qwen3-14B", "target": "Qwen3-32B", "support": "head", "batch": 1, "provider": "triton"}


@pytest.mark.parametrize("tokens,most_ms", [(4096, 1.9), (16384, 7.2)])
def test_the_kernel_is_near_the_memory_limit(tokens, most_ms):
    (row,) = rows("translate.csv", **LARGE, k=4, tokens=tokens)
    assert float(row["ms_p50"]) < most_ms
    assert float(row["percent_of_copy"]) >= 70
    assert float(row["times_faster_than_prefill"]) >= 250


def test_full_support_is_near_the_rate_of_a_large_product():
    (full,) = rows("translate.csv", **{**LARGE, "support": "full"}, k=4, tokens=4096)
    (matmul,) = rows("translate.csv", provider="matmul")
    operations = 2 * 64 * 2 * 4096 * (4 * 8 * 128) * (8 * 128)  # keys and values of 64 layers: 4,096 tokens x 4,096 inputs x 1,024 outputs
    assert operations / float(full["ms_p50"]) >= 0.7 * 2 * 8192**3 / float(matmul["ms_p50"])


def test_a_switch_costs_little_python():
    ms = {row["provider"]: float(row["ms_p50"]) for row in rows("translate.csv", case="TranslatedCache", tokens=1024)}
    assert ms["all layers at once"] < 0.8
    assert ms["first forward, translating lazily"] - ms["first forward, native cache"] <= 3
    assert ms["first forward, in update alone, translating lazily"] - ms["first forward, in update alone, native cache"] <= 3


def test_statistics_of_the_large_pair_take_under_a_second():
    (row,) = rows("moments.csv", k=8, tokens=128000)
    assert float(row["ms_p50"]) < 1000
    assert float(row["case"].split(", ")[1].split()[0]) < 2  # GiB of scratch


def test_every_timing_was_checked():
    timed = rows("translate.csv", case="kernel")
    assert len(timed) > 90 and {row["k"] for row in timed} == {"1", "4", "8"} and {row["batch"] for row in timed} == {"1", "8"}
    assert {row["tokens"] for row in timed} >= {"128", "1024", "4096", "16384", "65536"}
    assert len({(row["source"], row["target"]) for row in timed}) == 5
    assert {row["provider"] for row in timed} == {"triton", "reference", "torch.compile"}
    by_problem = {}
    for row in timed:
        assert float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"])
        assert all(row[name] for name in ("device", "torch", "triton", "commit", "prefill_ms"))
        problem = tuple(row[name] for name in ("source", "target", "support", "k", "batch", "tokens"))
        by_problem.setdefault(problem, {})[row["provider"]] = float(row["relative_error"])
    for errors in by_problem.values():
        assert errors["triton"] <= 1.2 * errors.get("reference", 1.66e-3)


def test_the_readme_shows_these_tables():
    readme = (ROOT / "README.md").read_text()
    assert speed_table.pairs_table() in readme and speed_table.cache_table() in readme
