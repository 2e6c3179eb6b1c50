"""Native features: the projection is the best of its rank, and its layers hold exactly what was projected."""

import pytest
import torch
from builders import a_model

from hf_crosscache import CacheGeometry
from hf_crosscache.errors import CalibrationError
from hf_crosscache.features import NativeFeatures, heads_of, layers_of, project
from hf_crosscache.moments import WeightedMoments
from hf_crosscache.panels import Panels
from hf_crosscache.states import LayerStates


def moments_of(x, y):
    return WeightedMoments.empty_like(x[None], y[None]).update(x[None], y[None])


def test_features_are_uncorrelated_and_of_unit_variance():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 12, generator=generator) @ torch.randn(12, 12, generator=generator) + 5
    y = x @ torch.randn(12, 30, generator=generator) + torch.randn(4000, 30, generator=generator)
    mean, projection = project(moments_of(x, y), 6, alpha=0.0)
    features = NativeFeatures(1, mean, projection).of(x[None])[0]
    torch.testing.assert_close(features.T.cov(correction=0), torch.eye(6), atol=1e-3, rtol=0)
    torch.testing.assert_close(features.mean(0), torch.zeros(6), atol=1e-3, rtol=0)


def test_a_planted_subspace_is_found():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5000, 20, generator=generator, dtype=torch.float64)
    within = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = x @ within @ torch.randn(3, 40, generator=generator, dtype=torch.float64)
    _, projection = project(moments_of(x.float(), y.float()), 3, alpha=1e-9)
    q = torch.linalg.qr(projection.double()).Q
    left_out = within - q @ (q.T @ within)
    assert left_out.norm() / within.norm() < 1e-3


def test_layers_hold_the_features_head_after_head():
    geometry = CacheGeometry.from_model(a_model("llama")[0])
    shape = geometry.layers[0]
    heads, dim = shape.num_key_value_heads, shape.head_dim
    width = heads * dim + dim // 2
    assert layers_of(width, shape) == 2 and heads_of(width, shape) == heads + 1
    hidden = torch.randn(2, 7, 10)
    features = NativeFeatures(1, torch.randn(10), torch.randn(10, width))
    plain = [torch.randn(2, heads, 7, dim) for _ in range(2)]
    states = LayerStates(plain, plain, geometry.rotary[:2], torch.arange(7, dtype=torch.int32)[None])
    joined = Panels(geometry, native=features).behind(states, hidden)
    flat = torch.cat([layer.transpose(1, 2).flatten(2) for layer in joined.keys[2:]], dim=-1)
    torch.testing.assert_close(flat[..., :width], features.of(hidden))
    assert not flat[..., width:].any() and joined.values[2] is joined.keys[2]
    torch.testing.assert_close(joined.of_role("keys").stripped(3), joined.values[3])  # nothing turned them


def test_a_width_that_the_hidden_state_has_not_is_refused():
    x = torch.randn(50, 4)
    with pytest.raises(CalibrationError, match="native_features = 5: 1 to 4"):
        project(moments_of(x, x), 5)
