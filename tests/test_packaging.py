"""The house: which room may call which, what a wheel holds, what is documented."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_crosscache

ROOT = Path(__file__).resolve().parent.parent
LIBRARY, KERNELS = ROOT / "hf_crosscache", ROOT / "kernels" / "hf_crosscache_kernels"
MAY_IMPORT_TRANSFORMERS = {"arithmetic", "artefact", "attention_cosine", "attention_outputs",
                           "attention_weights", "cache", "calibration",
                           "chat_spans", "cli", "compat", "continuations", "demo", "distillation", "evaluation", "export",
                           "fallback", "first_layers", "first_tokens", "geometry", "guard", "handoff", "identity",
                           "key_norm", "layers", "lm_eval_adapter", "placement", "prompt", "report", "retokenizing", "rotary", "source",
                           "survey", "task_evaluation", "task_report", "tasks", "texts", "token_bytes", "token_spans",
                           "translator", "tuning"}  # fmt: skip
ORDER = ["errors", "compat", "placement", "rope", "rotary", "geometry", "identity", "token_bytes", "token_spans",
         "alignment", "retokenizing", "chat_spans", "ops", "states", "moments", "ridge", "features", "source_features",
         "nonlinear_features", "key_norm", "maps", "native_states", "panels", "mixture", "translator", "routing",
         "arithmetic", "artefact", "fitter", "texts", "context", "source", "contexts", "prompt", "first_tokens",
         "first_layers", "stopwatch", "built_panels", "translation", "hand_off_report", "layers", "guard", "export",
         "fallback", "cache", "continuations", "handoff", "attention_weights", "attention_outputs", "calibration",
         "attention_cosine", "intervals", "feature_choice", "clusters", "mixture_fitting", "fitting", "trainable_mixture",
         "trainable", "distillation", "refinement", "evaluation", "report", "survey", "charts", "html_report", "tasks",
         "task_evaluation", "task_report", "lm_eval_adapter", "benchmark", "demo", "cli_arguments", "tuning", "cli",
         "__init__"]  # fmt: skip


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "") if node.module else "." * node.level + node.names[0].name


@pytest.mark.parametrize("path", sorted(LIBRARY.glob("*.py")), ids=lambda p: p.stem)
def test_dependencies_run_one_way(path):
    for name in imports(path):
        if name.startswith("."):
            called = name.lstrip(".")
            lazily = (path.stem, called) == ("translator", "artefact")  # inside save_pretrained and from_pretrained
            assert lazily or ORDER.index(called) < ORDER.index(path.stem), f"{path.stem} may not import {called}"
        if name.split(".")[0] == "hf_crosscache_kernels":
            assert path.stem == "ops"
        if name.split(".")[0] == "transformers":
            assert path.stem in MAY_IMPORT_TRANSFORMERS
        assert name.split(".")[0] != "triton"


def test_the_kernels_are_a_leaf():
    for path in KERNELS.glob("*.py"):
        assert not {n.split(".")[0] for n in imports(path)} & {"hf_crosscache", "transformers"}
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_files_are_short_and_say_what_they_are():
    for path in [*LIBRARY.glob("*.py"), *KERNELS.glob("*.py")]:
        assert len(path.read_text().splitlines()) <= 350, f"{path.name} is two ideas"
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), f"{path.name}: raise a readable error"


def test_public_names_are_documented():
    for name in hf_crosscache.__all__:
        assert getattr(hf_crosscache, name).__doc__, name
    assert (LIBRARY / "py.typed").exists() and (KERNELS / "py.typed").exists()


def test_a_wheel_holds_exactly_the_two_packages(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names}
    assert packages == {"hf_crosscache", "hf_crosscache_kernels", f"hf_crosscache-{hf_crosscache.__version__}.dist-info"}
    assert {
        "hf_crosscache/report_page.html",
        "hf_crosscache/py.typed",
        "hf_crosscache_kernels/py.typed",
        "hf_crosscache_kernels/reference.py",
    } <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
