"""The door to the kernels checks shapes and keeps float32 float32."""

import pytest
import torch

from hf_crosscache import ops
from hf_crosscache.errors import GeometryError


def translate(weight, blocks=1, out=(1, 2, 2, 5, 3)):
    states, positions = [torch.randn(2, 2, 5, 4)], torch.zeros(1, 5, dtype=torch.int32)
    tables = (torch.empty(1, 1, 0), torch.empty(1, 1, 0), torch.zeros(1, dtype=torch.int32))
    reads = torch.zeros(1, 2, 2, blocks, 2, dtype=torch.int32)
    outs = torch.empty(out), torch.empty(out)
    flags = ops.translate_kv(states, states, reads, weight, weight, torch.zeros(1, 2, 2, 3), tables, positions, tables, positions, *outs)
    return flags, outs


def test_shapes_that_do_not_fit_are_refused():
    weight = torch.randn(1, 2, 4, 3)
    assert translate(weight)[0].tolist() == [[0, 0]]
    with pytest.raises(GeometryError, match="the output has"):
        translate(weight, out=(1, 2, 2, 6, 3))
    with pytest.raises(GeometryError, match="reads 4 inputs a head; its 2 source heads give 8"):
        translate(weight, blocks=2)


def test_what_is_not_finite_is_flagged_by_layer_and_role():
    weight = torch.randn(1, 2, 4, 3)
    weight[0, 1, 2, 1] = float("nan")
    assert translate(weight)[0].tolist() == [[1, 1]]


def test_products_are_taken_without_tf32_and_the_setting_is_given_back():
    torch.set_float32_matmul_precision("high")
    try:
        with ops.full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
