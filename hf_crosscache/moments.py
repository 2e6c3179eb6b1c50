"""Streaming sufficient statistics of many weighted regressions at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import ops
from .errors import CalibrationError, GeometryError


@dataclass
class WeightedMoments:
    """First and second moments of G regressions of y on x, from any number of batches, mergeable.

    Sums are taken about a shift (the mean of the first batch), since keys with biases lie far from zero beside their spread and an
    uncentred Gram in float32 is not even positive definite then. Products of one batch are float32 without TF32, everything
    that runs over batches is float64. Memory depends on G, n and m alone: `8 G n (n + m)` bytes.

    total `[1 or G]`: sum of the sample weights. sum_x `[G, n]`, sum_y `[G or 1, m]`, sum_xx `[G, n, n]` (of which the lower triangle
    counts), sum_xy `[G, n, m]` and sum_yy `[G or 1, m]` (the diagonal alone) are weighted sums about shift_x `[G, n]` and shift_y
    `[G or 1, m]`; all float64.
    """

    shift_x: torch.Tensor
    shift_y: torch.Tensor
    total: torch.Tensor
    sum_x: torch.Tensor
    sum_y: torch.Tensor
    sum_xx: torch.Tensor
    sum_xy: torch.Tensor
    sum_yy: torch.Tensor

    @classmethod
    def about(cls, shift_x: torch.Tensor, shift_y: torch.Tensor, weights: int = 1) -> WeightedMoments:
        """Start moments about the shifts `[G, n]` and `[G or 1, m]`, with `weights` sums of weights: 1, or G for weights of each's own."""
        (groups, n), (y_groups, m) = shift_x.shape, shift_y.shape

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=shift_x.device)

        return cls(
            shift_x=shift_x.double(),
            shift_y=shift_y.double(),
            total=zeros(weights),
            sum_x=zeros(groups, n),
            sum_y=zeros(y_groups, m),
            sum_xx=zeros(groups, n, n),
            sum_xy=zeros(groups, n, m),
            sum_yy=zeros(y_groups, m),
        )

    @classmethod
    def empty_like(cls, x: torch.Tensor, y: torch.Tensor) -> WeightedMoments:
        """Start moments for batches shaped like x `[G, N, n]` and y `[G or 1, N, m]`, shifted by their means."""
        return cls.about(x.mean(1), y.mean(1))

    @property
    def sums(self) -> tuple[torch.Tensor, ...]:
        """What `ops.accumulate_moments` adds to, in its order."""
        return self.total, self.sum_x, self.sum_y, self.sum_xx, self.sum_xy, self.sum_yy

    def update(self, x: torch.Tensor, y: torch.Tensor, sample_weight: torch.Tensor | None = None) -> WeightedMoments:
        """Add a batch.

        Args:
            x: `[G, N, n]` inputs, any floating dtype.
            y: `[G, N, m]` outputs, or `[1, N, m]` shared by all regressions.
            sample_weight: `[N]` non-negative weight of each row, None for ones; a weight of 2 is the row given twice.

        Raises:
            CalibrationError: x or y is not finite.
            GeometryError: the shapes differ from those of the batches before.
        """
        expected = (*self.sum_x.shape, *self.sum_y.shape)
        found = (x.shape[0], x.shape[2], y.shape[0], y.shape[2])
        if expected != found or x.shape[1] != y.shape[1]:
            raise GeometryError(f"Moments of (G, n, G or 1, m) = {expected} were given x {tuple(x.shape)} and y {tuple(y.shape)}.")
        x = x.float() - self.shift_x.float()[:, None]
        y = y.float() - self.shift_y.float()[:, None]
        rows = None if sample_weight is None else sample_weight[None].float()
        xx, xy, yy, sum_x, sum_y, total = ops.weighted_products(x, y, rows)
        for mine, batch in (
            (self.sum_xx, xx), (self.sum_xy, xy), (self.sum_yy, yy), (self.sum_x, sum_x), (self.sum_y, sum_y), (self.total, total)
        ):  # fmt: skip
            mine += batch
        return self.check_finite()

    def check_finite(self) -> WeightedMoments:
        """Refuse states that were not finite.

        Raises:
            CalibrationError: a sum is NaN or infinite.
        """
        if not torch.isfinite(self.total.sum() + self.sum_x.sum() + self.sum_yy.sum()):
            raise CalibrationError("The states of a calibration batch are not finite: is a model loaded in float16?")
        return self

    def merge(self, other: WeightedMoments) -> WeightedMoments:
        """Add the moments of other batches, exactly: their sums are moved to this shift in float64."""
        if self.sum_xy.shape != other.sum_xy.shape:
            raise GeometryError(f"Moments of shape {tuple(self.sum_xy.shape)} cannot take {tuple(other.sum_xy.shape)}.")
        dx, dy = other.shift_x - self.shift_x, other.shift_y - self.shift_y
        self.sum_xx += other.sum_xx + _outer(dx, other.sum_x) + _outer(other.sum_x, dx) + _wide(other.total) * _outer(dx, dx)
        self.sum_xy += other.sum_xy + _outer(dx, other.sum_y) + _outer(other.sum_x, dy) + _wide(other.total) * _outer(dx, dy)
        self.sum_yy += other.sum_yy + 2 * dy * other.sum_y + other.total[:, None] * dy.square()
        self.sum_x += other.sum_x + other.total[:, None] * dx
        self.sum_y += other.sum_y + other.total[:, None] * dy
        self.total += other.total
        return self

    @property
    def weight(self) -> float:
        """Sum of the sample weights, on average over regressions: the number of rows where none were given."""
        return self.total.mean().item()

    @property
    def mean_x(self) -> torch.Tensor:
        """`[G, n]` float64."""
        return self.shift_x + self.sum_x / self.total[:, None]

    @property
    def mean_y(self) -> torch.Tensor:
        """`[G or 1, m]` float64."""
        return self.shift_y + self.sum_y / self.total[:, None]

    @property
    def sigma_xx(self) -> torch.Tensor:
        """Covariance of the inputs, `[G, n, n]` float64."""
        lower = self.sum_xx.tril()
        full = lower + lower.tril(-1).transpose(1, 2)
        return full / _wide(self.total) - _outer(self.sum_x, self.sum_x) / _wide(self.total) ** 2

    @property
    def sigma_xy(self) -> torch.Tensor:
        """Covariance of inputs and outputs, `[G, n, m]` float64."""
        return self.sum_xy / _wide(self.total) - _outer(self.sum_x, self.sum_y) / _wide(self.total) ** 2

    @property
    def variance_y(self) -> torch.Tensor:
        """Variance of each output, `[G or 1, m]` float64."""
        total = self.total[:, None]
        return self.sum_yy / total - (self.sum_y / total).square()

    def groups(self, some: slice) -> WeightedMoments:
        """Return the moments of some of the regressions, as views."""
        own = {
            name: getattr(self, name)[some] if getattr(self, name).shape[0] == len(self.sum_x) else getattr(self, name)
            for name in ("shift_y", "total", "sum_y", "sum_yy")
        }
        return WeightedMoments(
            shift_x=self.shift_x[some], sum_x=self.sum_x[some], sum_xx=self.sum_xx[some], sum_xy=self.sum_xy[some], **own
        )

    def select_inputs(self, columns: torch.Tensor) -> WeightedMoments:
        """Keep some inputs of each regression.

        Args:
            columns: `[G, n']` indices into the n inputs.
        """
        n, m = self.sum_xy.shape[1:]
        wide = columns[:, :, None]
        lower = self.sum_xx.tril()
        rows = (lower + lower.tril(-1).transpose(1, 2)).gather(1, wide.expand(-1, -1, n))
        return WeightedMoments(
            shift_x=self.shift_x.gather(1, columns),
            shift_y=self.shift_y,
            total=self.total,
            sum_x=self.sum_x.gather(1, columns),
            sum_y=self.sum_y,
            sum_xx=rows.gather(2, columns[:, None, :].expand(-1, columns.shape[1], -1)),
            sum_xy=self.sum_xy.gather(1, wide.expand(-1, -1, m)),
            sum_yy=self.sum_yy,
        )


def _outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, :, None] * b[:, None, :]


def _wide(total: torch.Tensor) -> torch.Tensor:
    return total[:, None, None]
