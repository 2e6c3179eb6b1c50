"""`translate_kv`, by every implementation that runs here, against a float64 oracle on outputs full of NaN."""

import os

import pytest
import torch
from hf_crosscache_kernels import translate_kv, translate_kv_reference
from problems import LONG, TRANSLATIONS, Translation, relative_error, translation_oracle

CUDA = torch.cuda.is_available()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-4, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("problem", TRANSLATIONS, ids=lambda p: p.id)
def test_the_reference_is_the_oracle(problem):
    a = problem.arguments()
    translate_kv_reference(**a)
    for found, oracle in zip((a["out_keys"], a["out_values"]), translation_oracle(a), strict=True):
        assert relative_error(found, oracle) < TOLERANCE[problem.dtype]
    assert not a["flags"].any()


@pytest.mark.parametrize("problem", TRANSLATIONS + LONG, ids=lambda p: p.id)
def test_the_kernel_is_the_oracle(problem, triton_here):
    if problem.tokens > 500 and not CUDA:
        pytest.skip("long for the interpreter")
    a = problem.arguments(triton_here)
    translate_kv(**a)
    oracle = translation_oracle(a)
    errors = [relative_error(found, want) for found, want in zip((a["out_keys"], a["out_values"]), oracle, strict=True)]
    assert max(errors) < TOLERANCE[problem.dtype] and not a["flags"].any()
    if problem.dtype == torch.bfloat16 and CUDA:  # the interpreter cuts bfloat16 where a device rounds it
        b = problem.arguments(triton_here)
        translate_kv_reference(**b)
        for error, found, want in zip(errors, (b["out_keys"], b["out_values"]), oracle, strict=True):
            assert error <= 1.2 * relative_error(found, want)


def test_nothing_but_the_outputs_is_written(triton_here):
    problem = Translation("margins", tokens=33, batch=2)
    a = problem.arguments(triton_here)
    whole = a["out_keys"]._base
    before = [states.clone() for states in a["source_keys"] + a["source_values"]]
    translate_kv(**a)
    assert whole[:, :, :, :, :3].isnan().all() and whole[:, :, :, :, -1].isnan().all() and not whole[:, :, :, :, 3:-1].isnan().any()
    assert all(torch.equal(x, y) for x, y in zip(before, a["source_keys"] + a["source_values"], strict=True))


def test_the_same_seeds_give_the_same_bits(triton_here):
    problem = Translation("twice", tokens=100, dtype=torch.bfloat16)
    results = []
    for _ in range(2):
        a = problem.arguments(triton_here)
        translate_kv(**a)
        results.append((a["out_keys"].clone(), a["out_values"].clone()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_context_longer_than_the_scratch_goes_in_parts(triton_here, monkeypatch):
    monkeypatch.setattr("hf_crosscache_kernels.translate._SCRATCH_BYTES", 1)
    a = Translation("parts", tokens=300, batch=2, begin=3).arguments(triton_here)
    translate_kv(**a)
    for found, oracle in zip((a["out_keys"], a["out_values"]), translation_oracle(a), strict=True):
        assert relative_error(found, oracle) < 1e-5


@pytest.mark.parametrize("role,value", [("source_keys", float("inf")), ("source_values", float("nan"))])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_what_is_not_finite_raises_its_flag_alone(implementation, role, value, triton_here):
    a = Translation("poison", target=(3, 2, 32)).arguments(triton_here if implementation == "triton" else "cpu")
    at = 0 if role == "source_keys" else 1
    layer, head = a["blocks"][1, at, 1, 0].tolist()
    a[role][layer][0, head, 41, 3] = value
    readers = {n for n in range(3) if [layer, head] in a["blocks"][n, at].flatten(0, 1).tolist()}
    (translate_kv if implementation == "triton" else translate_kv_reference)(**a)
    assert {tuple(found) for found in a["flags"].nonzero().tolist()} == {(n, at) for n in readers}


def test_layers_of_several_shapes_are_refused(triton_here):
    a = Translation("uneven").arguments(triton_here)
    a["source_values"][1] = a["source_values"][1][:, :1].contiguous()
    with pytest.raises(ValueError, match="one shape and dtype expected"):
        translate_kv(**a)


def test_layers_of_several_strides_are_copied(triton_here):
    a = Translation("strides", batch=2).arguments(triton_here)
    a["source_keys"][1] = a["source_keys"][1].transpose(1, 2).contiguous().transpose(1, 2)
    a["source_values"][2] = a["source_values"][2].transpose(2, 3).contiguous().transpose(2, 3)
    translate_kv(**a)
    for found, oracle in zip((a["out_keys"], a["out_values"]), translation_oracle(a), strict=True):
        assert relative_error(found, oracle) < 1e-5


@pytest.mark.parametrize("role,value", [(0, 70000.0), (0, 60000.0), (1, 70000.0)])
def test_a_float16_cache_that_overflows_raises_its_flag(role, value, triton_here):
    """60,000 fits, but not once it is turned by up to 45 degrees."""
    a = Translation("overflow", dtype=torch.float16).arguments(triton_here)
    a["bias"][1, role, 2, [5, 21]] = value
    translate_kv(**a)
    expected = torch.zeros(2, 2, dtype=torch.int32)
    expected[1, role] = 1
    assert torch.equal(a["flags"].cpu(), expected)
    assert a[("out_keys", "out_values")[role]][1].isinf().any()


def test_what_describes_the_problem_may_be_strided(triton_here):
    a = Translation("descriptions", batch=2, tables=2).arguments(triton_here)
    oracle = translation_oracle(a)
    for name in ("source_positions", "target_positions", "source_tables", "target_tables"):
        a[name] = a[name].repeat_interleave(2, dim=-1)[..., ::2]
    a["blocks"] = a["blocks"].transpose(0, 3).contiguous().transpose(0, 3)
    assert not a["blocks"].is_contiguous() and not a["source_positions"].is_contiguous()
    translate_kv(**a)
    for found, want in zip((a["out_keys"], a["out_values"]), oracle, strict=True):
        assert relative_error(found, want) < 1e-5


def test_outputs_that_a_kernel_would_write_past_are_refused(triton_here):
    a = Translation("outputs").arguments(triton_here)
    for name in ("out_keys", "flags"):
        spoiled = {**a, name: a[name].transpose(-1, -2).contiguous().transpose(-1, -2)}
        with pytest.raises(ValueError, match=f"{name} of shape"):
            translate_kv(**spoiled)


def test_no_tokens_are_no_work(triton_here):
    a = Translation("nothing", tokens=0).arguments(triton_here)
    translate_kv(**a)
    assert not a["flags"].any()


def test_a_schedule_fits_the_device(monkeypatch):
    from hf_crosscache_kernels import translate

    for limit in (99 << 10, 163 << 10, 227 << 10):
        monkeypatch.setattr(translate, "shared_memory", lambda device, limit=limit: limit)
        for operand_bytes, dim, shared in ((2, 128, True), (2, 256, False), (4, 128, True), (4, 256, True), (2, 64, False)):
            found = translate._schedule(operand_bytes, dim, 4096, shared, torch.device("cuda"))
            assert found["num_stages"] * 64 * (found["BLOCK_T"] + dim) * operand_bytes <= limit


def test_folding_the_rotations_into_one_is_wrong():
    a, b = (Translation("folded", target=(1, 1, 32)).arguments() for _ in range(2))
    translate_kv_reference(**a)
    b["target_positions"] = a["target_positions"] - a["source_positions"]  # the difference of the angles, on keys as cached
    b["source_cos"], b["source_sin"] = torch.ones_like(a["source_cos"]), torch.zeros_like(a["source_sin"])
    translate_kv_reference(**b)
    assert relative_error(b["out_keys"], a["out_keys"].double()) > 0.1


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device with 40 GB")
def test_tensors_past_two_to_the_31_elements():
    problem = Translation("huge", tokens=70_000, source=(2, 16, 128), target=(17, 16, 128), k=1, dtype=torch.bfloat16)
    a = problem.arguments("cuda")
    assert a["out_keys"].numel() > 2**31
    translate_kv(**a)
    last = {**a, "begin": 69_936}
    for name in ("out_keys", "out_values"):
        last[name] = a[name][-1:, :, :, -64:]
    for name in ("blocks", "key_weight", "value_weight", "bias", "target_tables"):
        last[name] = a[name][-1:]
    for name in ("source_positions", "target_positions"):
        last[name] = a[name][:, -64:]
    for found, oracle in zip((last["out_keys"], last["out_values"]), translation_oracle(last), strict=True):
        assert relative_error(found, oracle) < 4e-3
    assert not any(a[name][:, :, :, i].isnan().any() for name in ("out_keys", "out_values") for i in (0, 35_000, -1))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter cannot be traced")
def test_it_is_a_torch_operation():
    a = Translation("op", tokens=5, dtype=torch.float32).arguments("cuda" if CUDA else "cpu")
    a["out_keys"], a["out_values"] = a["out_keys"].contiguous(), a["out_values"].contiguous()
    torch.library.opcheck(torch.ops.hf_crosscache.translate_kv.default, tuple(a.values()))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(arguments):
        translate_kv(**arguments)
        return arguments["out_keys"] * 2

    doubled = compiled(a)
    b = Translation("op", tokens=5).arguments("cuda" if CUDA else "cpu")
    translate_kv(**b)
    torch.testing.assert_close(doubled, 2 * b["out_keys"])
