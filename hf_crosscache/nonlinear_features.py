"""Nonlinear features: a hidden layer over the other features, so that the maps that read it are affine with an MLP beside."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from . import ops
from .errors import CalibrationError

_BIAS = 0.5  # standard deviation of the biases; features have one of 1


@dataclass(frozen=True, eq=False)
class NonlinearFeatures:
    """Hidden units over features z of unit variance, brought to mean 0 and unit variance themselves.

        phi = (gelu(z weight + bias) - mean) scale

    The maps that read phi are the output layer; weight and bias are drawn at random.

    weight: `[r, h]`, bias, mean, scale: `[h]`; float32.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def drawn(cls, inputs: int, width: int, seed: int = 0) -> NonlinearFeatures:
        """Draw h units over r features, as yet without their own mean and scale.

        Raises:
            CalibrationError: there are no units, or nothing that they could read.
        """
        if width < 1:
            raise CalibrationError(f"nonlinear_features = {width}: at least 1 expected, or None for none.")
        if inputs < 1:
            raise CalibrationError(
                f"nonlinear_features = {width} of no features: they read native or source features. Give source_features=, or "
                "Calibration native_layers=."
            )
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(inputs, width, generator=generator) / inputs**0.5
        bias = _BIAS * torch.randn(width, generator=generator)
        return cls(weight, bias, torch.zeros(width), torch.ones(width))

    @property
    def width(self) -> int:
        """h, the number of hidden units."""
        return self.weight.shape[1]

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """Return the hidden units `[B, T, h]` of features `[B, T, r]`, in float32."""
        weight, bias, mean, scale = (tensor.to(features.device) for tensor in (self.weight, self.bias, self.mean, self.scale))
        with ops.full_float32():
            return (F.gelu(features.float() @ weight + bias) - mean) * scale

    def standardised(self, mean: torch.Tensor, variance: torch.Tensor) -> NonlinearFeatures:
        """Return the units so that, of this mean and variance `[h]` until now, they have mean 0 and variance 1; constant ones stay 0."""
        scale = torch.where(variance > 1e-12, variance.clamp_min(1e-12).rsqrt(), torch.zeros_like(variance)).to(self.scale)
        return replace(self, mean=self.mean + mean.to(self.mean) / self.scale, scale=self.scale * scale)

    def to(self, device: torch.device | str) -> NonlinearFeatures:
        return NonlinearFeatures(*(tensor.to(device) for tensor in (self.weight, self.bias, self.mean, self.scale)))
