"""RoPE comes off and goes on exactly, for every table the library reads."""

import pytest
import torch
from builders import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb

from hf_crosscache import CacheGeometry
from hf_crosscache.rope import NO_ROTATION, RotaryStack, RotaryTable, apply_rope, strip_rope, to_half_split, to_interleaved


def table(dim, scaling=1.0, base=10000.0):
    return RotaryTable(base ** (-torch.arange(0, dim, 2).float() / dim), scaling)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.sampled_from([8, 64, 128]), st.sampled_from([1.0, 0.5]),
    st.sampled_from([1.0, 1.3466]), st.integers(0, 30000)
)  # fmt: skip
def test_strip_undoes_apply(batch, heads, length, dim, rotated, scaling, start):
    rotary = table(int(dim * rotated), scaling)
    keys = torch.randn(batch, heads, length, dim)
    positions = start + torch.arange(length)[None]
    cos, sin = rotary.cos_sin(positions, torch.float32)
    torch.testing.assert_close(strip_rope(apply_rope(keys, cos, sin), cos, sin), keys, rtol=1e-5, atol=1e-5)


def test_rounded_tables_are_undone_too():
    cos, sin = table(64).cos_sin(torch.tensor([[5, 999, 20000]]), torch.bfloat16)
    keys = torch.randn(1, 2, 3, 64)
    torch.testing.assert_close(strip_rope(apply_rope(keys, cos, sin), cos, sin), keys, rtol=1e-5, atol=1e-5)


def test_dimensions_beyond_the_rotary_ones_pass():
    cos, sin = table(16).cos_sin(torch.tensor([[3]]), torch.float32)
    keys = torch.randn(1, 1, 1, 64)
    assert torch.equal(apply_rope(keys, cos, sin)[..., 16:], keys[..., 16:])


@given(st.sampled_from([2, 8, 16]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_half_split_and_interleaved_undo_each_other(rotary_dim, dtype):
    keys = torch.randn(2, 3, 5, 16).to(dtype)
    assert torch.equal(to_interleaved(to_half_split(keys, rotary_dim), rotary_dim), keys)
    assert torch.equal(to_half_split(to_interleaved(keys, rotary_dim), rotary_dim), keys)
    assert to_half_split(torch.arange(10), 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 9]


def test_reordered_keys_of_an_interleaved_model_are_stripped_and_turned():
    model = tiny_model("glm4")
    rotary = CacheGeometry.from_model(model).rotary[0]
    keys, positions = torch.randn(2, 3, 4, 16), torch.tensor([[0, 5, 60, 500]])
    cached, _ = apply_rotary_pos_emb(keys, keys, *model.model.rotary_emb(keys, positions))
    cos_sin = rotary.cos_sin(positions, torch.float32)
    stripped = strip_rope(to_half_split(cached, 8), *cos_sin)
    torch.testing.assert_close(stripped, to_half_split(keys, 8), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(to_interleaved(apply_rope(stripped, *cos_sin), 8), cached, rtol=1e-4, atol=1e-4)


def test_a_layer_without_rope_is_left_exactly_as_it_is():
    still, keys = RotaryTable(torch.zeros(4), 1.0), torch.randn(2, 3, 4, 16)
    cos_sin = still.cos_sin(torch.tensor([[0, 5, 60, 500]]), torch.bfloat16)
    assert torch.equal(strip_rope(keys, *cos_sin), keys) and torch.equal(apply_rope(keys, *cos_sin), keys)


def test_one_rotation_by_the_difference_is_wrong_for_a_map():
    source, target, positions = table(8), table(8, base=500.0), torch.tensor([[37]])
    weight = torch.randn(8, 8)
    keys = torch.randn(1, 1, 1, 8)
    on, off = target.cos_sin(positions, torch.float32), source.cos_sin(positions, torch.float32)
    right = apply_rope(strip_rope(keys, *off) @ weight, *on)
    folded = apply_rope(strip_rope(keys @ weight, *off), *on)
    assert (right - folded).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "llama3", "llama_linear", "qwen2", "qwen3", "mistral"])
def test_tables_are_those_of_the_model(family):
    model = tiny_model(family)
    rotary = CacheGeometry.from_model(model).rotary[0]
    positions = torch.tensor([[0, 1, 60, 127, 128, 500]])
    cos, sin = model.model.rotary_emb(torch.empty(1), positions)
    mine = rotary.cos_sin(positions, torch.float32)
    half = rotary.rotary_dim // 2
    torch.testing.assert_close(mine[0], cos[..., :half], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[1], sin[..., :half], rtol=1e-5, atol=1e-5)


def test_attention_scaling_is_divided_out():
    model = tiny_model("llama_yarn")
    assert CacheGeometry.from_model(model).rotary[0].attention_scaling > 1.1


def test_a_stack_tabulates_equal_tables_once_and_grows():
    local, everywhere, cpu = table(8), table(8, base=500.0), torch.device("cpu")
    stack = RotaryStack([local, everywhere, local])
    cos, sin = stack.cos_sin(9, torch.float32, cpu)
    assert cos.shape[0] == 2 and stack.index([2, 1, 0], cpu).tolist() == [0, 1, 0]
    torch.testing.assert_close(sin[1, :9], everywhere.cos_sin(torch.arange(9)[None], torch.float32)[1][0])
    assert stack.cos_sin(cos.shape[1], torch.float32, cpu)[0] is cos
    assert stack.cos_sin(cos.shape[1] + 1, torch.float32, cpu)[0].shape[1] > cos.shape[1]
    assert stack.cos_sin(9, torch.bfloat16, cpu)[0].dtype == torch.bfloat16


def test_a_stack_of_different_rotary_dims_is_refused_and_an_empty_one_turns_nothing():
    with pytest.raises(ValueError, match=r"\[8, 16\] found"):
        RotaryStack([table(8), table(16)])
    assert NO_ROTATION.cos_sin(5, torch.float32, torch.device("cpu"))[0].shape[2] == 0
