"""The door to the kernels checks shapes and keeps float32 float32."""

import pytest
import torch

from hf_crosscache import ops
from hf_crosscache.errors import GeometryError

STATES = {0: torch.randn(2, 2, 5, 4)}
BLOCKS = (((0, 0),), ((0, 1),))


def test_shapes_that_do_not_fit_are_refused():
    weight, bias = torch.randn(2, 4, 3), torch.zeros(2, 3)
    with pytest.raises(GeometryError, match="the output has"):
        ops.map_heads(STATES, BLOCKS, weight, bias, torch.empty(2, 2, 6, 3))
    with pytest.raises(GeometryError, match="reads 4 inputs a head; its 2 source heads give 8"):
        ops.map_heads(STATES, (((0, 0), (0, 1)),), weight, bias, torch.empty(2, 2, 5, 3))


def test_products_are_taken_without_tf32_and_the_setting_is_given_back():
    torch.set_float32_matmul_precision("high")
    try:
        with ops.full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
