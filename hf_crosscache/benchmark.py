"""How fast a pair of models can be switched: translation by every provider against the target's own prefill, with its correctness check."""

from __future__ import annotations

import csv
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import ops
from .errors import CrossCacheError
from .geometry import CacheGeometry
from .rope import RotaryStack

FIELDS: tuple[str, ...] = (
    "case", "source", "target", "support", "k", "batch", "tokens", "dtype", "provider", "ms_p20", "ms_p50", "ms_p80", "gb_per_s",
    "percent_of_copy", "prefill_ms", "times_faster_than_prefill", "relative_error", "device", "torch", "triton", "commit",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One model of a pair: what its cache looks like, and how long it reads a context, in milliseconds by (batch, tokens)."""

    name: str
    geometry: CacheGeometry
    prefill_ms: Callable[[int, int], float] | None = None


@dataclass(frozen=True)
class Row:
    """One timing, as a row of the result files; percentiles over repeats, gigabytes are 10^9 streamed bytes."""

    case: str
    source: str
    target: str
    support: str
    k: int
    batch: int
    tokens: int
    dtype: str
    provider: str
    ms_p20: float
    ms_p50: float
    ms_p80: float
    gb_per_s: float | None
    percent_of_copy: float | None
    prefill_ms: float | None
    times_faster_than_prefill: float | None
    relative_error: float | None
    device: str
    torch: str
    triton: str
    commit: str


class Problem:
    """Random maps between two real geometries, and a random source cache: what one translation of all target layers reads and writes.

    Args:
        support: "head": every target head reads k source heads, drawn from all; "full": all heads of k source layers, drawn for each
            target layer.
    """

    def __init__(
        self,
        source: CacheGeometry,
        target: CacheGeometry,
        *,
        support: str,
        k: int,
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.source, self.target, self.dtype, self.device = source, target, dtype, device
        generator = torch.Generator(device).manual_seed(seed)
        draw = torch.Generator().manual_seed(seed)
        shape, own = source.layers[0], target.layers[0]
        layers, heads = len(target), own.num_key_value_heads
        if support == "head":
            chosen = torch.stack([torch.randperm(source.num_heads, generator=draw)[:k] for _ in range(2 * layers * heads)])
            chosen = chosen.view(layers, 2, heads, k)
            self.blocks = torch.stack((chosen // shape.num_key_value_heads, chosen % shape.num_key_value_heads), dim=-1).int()
        else:
            chosen = torch.stack([torch.randperm(len(source), generator=draw)[:k] for _ in range(2 * layers)]).view(layers, 2, 1, k)
            which = torch.arange(shape.num_key_value_heads).expand(layers, 2, 1, k, -1)
            self.blocks = torch.stack((chosen[..., None].expand_as(which), which), dim=-1).flatten(3, 4).int()
        self.blocks = self.blocks.to(device)
        width = self.blocks.shape[3] * shape.head_dim

        def normal(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        size = (batch, shape.num_key_value_heads, tokens, shape.head_dim)
        self.keys, self.values = ([normal(*size) for _ in source.layers] for _ in range(2))
        scale = width**-0.5
        self.weights = [normal(layers, heads, width, own.head_dim, dtype=d).mul_(scale) for d in ops.weight_dtypes(dtype)]
        self.bias = normal(layers, 2, heads, own.head_dim, dtype=torch.float32)
        self.rotations = [
            (*RotaryStack(side.rotary).cos_sin(tokens, dtype, device), RotaryStack(side.rotary).index(range(len(side)), device))
            for side in (source, target)
        ]
        self.position_ids = torch.arange(tokens, dtype=torch.int32, device=device)[None]
        self.out = torch.full((2, layers, batch, heads, tokens, own.head_dim), float("nan"), dtype=dtype, device=device)
        read = self.blocks.shape[3] * shape.head_dim if support == "head" else self.blocks.shape[3] * shape.head_dim / heads
        self.streamed_bytes = 2 * layers * heads * batch * tokens * (read + own.head_dim) * dtype.itemsize
        self.operations = 2 * 2 * layers * heads * batch * tokens * width * own.head_dim

    def translate(self) -> None:
        """Translate all target layers."""
        source, target = self.rotations
        (key_weight, value_weight), (keys, values) = self.weights, self.out
        ops.translate_kv(
            self.keys, self.values, self.blocks, key_weight, value_weight, self.bias, source, self.position_ids, target,
            self.position_ids, keys, values,
        )  # fmt: skip

    def compiled(self) -> Callable[[], None]:
        """Return the same translation as plain torch through torch.compile, one graph a target layer."""
        source, target = self.rotations
        groups = [self.blocks[n].tolist() for n in range(len(self.target))]
        cos, sin = (table[0, : self.position_ids.shape[1]].float() for table in source[:2])
        norm = cos.square() + sin.square()
        off, on = (cos / norm, -sin / norm), tuple(table[0, : self.position_ids.shape[1]].float() for table in target[:2])

        @torch.compile(dynamic=False)
        def one_layer(keys, values, key_weight, value_weight, bias, off_cos, off_sin, on_cos, on_sin, out_keys, out_values):
            keys = _turned(keys.float(), off_cos, off_sin).to(key_weight.dtype)
            for role, (states, weight) in enumerate(((keys, key_weight), (values, value_weight))):
                mapped = torch.einsum("hkbtd,hkdo->bhto", states, weight.unflatten(1, (states.shape[1], -1))).float() + bias[role][:, None]
                if role == 0:
                    out_keys.copy_(_turned(mapped, on_cos, on_sin))
                else:
                    out_values.copy_(mapped)

        def run() -> None:
            for n, (key_heads, value_heads) in enumerate(groups):
                keys, values = (
                    torch.stack([torch.stack([states[layer][:, head] for layer, head in group]) for group in heads])
                    for states, heads in ((self.keys, key_heads), (self.values, value_heads))
                )
                key_weight, value_weight = (weight[n] for weight in self.weights)
                one_layer(
                    keys, values, key_weight, value_weight, self.bias[n], off[0], off[1], on[0], on[1], self.out[0, n], self.out[1, n]
                )

        return run

    def relative_error(self, layer_idx: int, rows: int = 64) -> float:
        """Hold one target layer, at some positions, against the same maps in float64, with complex numbers for the rotations."""
        tokens = self.position_ids.shape[1]
        at = torch.linspace(0, tokens - 1, min(rows, tokens), device=self.device).long()
        turns = []
        for (cos, sin, index), layers in zip(self.rotations, (range(len(self.source)), [layer_idx]), strict=True):
            turns.append({layer: torch.complex(cos[index[layer], at].double(), sin[index[layer], at].double()) for layer in layers})
        worst = 0.0
        for role, states in enumerate((self.keys, self.values)):
            for head in range(self.out.shape[3]):
                reads = self.blocks[layer_idx, role, head if self.blocks.shape[2] > 1 else 0].tolist()
                parts = [states[layer][:, source_head, at].double() for layer, source_head in reads]
                if role == 0:
                    parts = [_times(x, 1 / turns[0][layer]) for x, (layer, _) in zip(parts, reads, strict=True)]
                want = torch.cat(parts, -1) @ self.weights[role][layer_idx, head].double() + self.bias[layer_idx, role, head].double()
                want = _times(want, turns[1][layer_idx]) if role == 0 else want
                got = self.out[role, layer_idx, :, head, at].double()
                worst = max(worst, ((got - want).norm() / want.norm()).item())
        return worst


def measure(
    source: Side,
    target: Side,
    *,
    k: int,
    batch: int,
    tokens: int,
    device: torch.device,
    copy_gb_per_s: float,
    support: str = "head",
    dtype: torch.dtype = torch.bfloat16,
    providers: Iterable[str] = ("triton",),
    milliseconds: float = 100,
    commit: str = "",
) -> Iterator[Row]:
    """Time the translation of all target layers by some providers, each after its correctness check.

    Args:
        providers: "triton" (what the library runs on CUDA), "reference" (what it runs elsewhere), "torch.compile".
        copy_gb_per_s: measured on the same device (`copy_bandwidth`), to compare with.
        milliseconds: about how long each provider is timed.

    Raises:
        CrossCacheError: a result is further from a float64 oracle than its dtype allows.
    """
    problem = Problem(source.geometry, target.geometry, support=support, k=k, batch=batch, tokens=tokens, dtype=dtype, device=device)
    prefill = None if target.prefill_ms is None else target.prefill_ms(batch, tokens)
    for provider in providers:
        problem.out.fill_(float("nan"))
        run = problem.compiled() if provider == "torch.compile" else problem.translate
        with ops.forced_backend("reference" if provider == "reference" else None):
            run()
            error = max(problem.relative_error(layer) for layer in {0, len(target.geometry) // 2, len(target.geometry) - 1})
            if not error <= {torch.float32: 1e-5}.get(dtype, 5e-3):
                raise CrossCacheError(f"{provider}, {tokens} tokens, k = {k}: relative error {error:.2g} against a float64 oracle.")
            p20, p50, p80 = percentiles(run, device, milliseconds)
        rate = problem.streamed_bytes / p50 / 1e6
        yield Row(
            "kernel", source.name, target.name, support, k, batch, tokens, str(dtype).removeprefix("torch."), provider,
            round(p20, 4), round(p50, 4), round(p80, 4), round(rate, 1), round(100 * rate / copy_gb_per_s, 1),
            None if prefill is None else round(prefill, 2), None if prefill is None else round(prefill / p50, 1),
            float(f"{error:.3g}"), *versions(device), commit,
        )  # fmt: skip


def percentiles(run: Callable[[], object], device: torch.device, milliseconds: float = 100) -> tuple[float, float, float]:
    """Time a call: 20th, 50th and 80th percentile in milliseconds.

    On CUDA by events around calls that are queued one behind the other, with the L2 cache cleared before each, so that what is timed is
    the device's work; elsewhere by the clock.
    """
    for _ in range(2):
        run()
    times: list[float] = []
    if device.type == "cuda":
        flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
        once = _queued_ms(run, flush, 3)[1]
        times = _queued_ms(run, flush, max(7, min(200, int(milliseconds / once))))
    else:
        while len(times) < 3 or (sum(times) < milliseconds and len(times) < 200):
            start = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - start))
    return spread(times)


def spread(times: list[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile."""
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return deciles[1], statistics.median(times), deciles[7]


def copy_bandwidth(device: torch.device) -> float:
    """Measure a large copy in GB/s (10^9 bytes, read and written)."""
    size = (1 << 31) if device.type == "cuda" else 1 << 25
    x = torch.randn(size // 2, device=device).to(torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.numel() * 2 / percentiles(lambda: y.copy_(x), device)[1] / 1e6


def versions(device: torch.device) -> tuple[str, str, str]:
    """Device, torch and triton, for the record."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", torch.__version__, triton


def append(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a result file, with its heading where it is new."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(FIELDS), lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})
            file.flush()


def table(rows: Iterable[Row]) -> str:
    """Format rows for people."""
    lines = [
        f"{'tokens':>7}{'batch':>6}{'k':>4}  {'provider':<14}{'p50 ms':>9}{'GB/s':>8}{'% copy':>8}{'prefill ms':>12}{'faster':>8}  error"
    ]
    for row in rows:
        rate = " " * 8 if row.gb_per_s is None else f"{row.gb_per_s:>8.0f}"
        share = " " * 8 if row.percent_of_copy is None else f"{row.percent_of_copy:>7.1f}%"
        prefill = f"{row.prefill_ms:>12.2f}{row.times_faster_than_prefill:>7.1f}x" if row.prefill_ms is not None else " " * 20
        lines.append(
            f"{row.tokens:>7}{row.batch:>6}{row.k:>4}  {row.provider:<14}{row.ms_p50:>9.3f}{rate}{share}"
            f"{prefill}  {'' if row.relative_error is None else format(row.relative_error, '.2g')}"
        )
    return "\n".join(lines)


def _queued_ms(run: Callable[[], object], flush: torch.Tensor, repeats: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        flush.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def _turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _times(states: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    half = turn.shape[-1]
    turned = torch.complex(states[..., :half], states[..., half : 2 * half]) * turn
    return torch.cat((turned.real, turned.imag, states[..., 2 * half :]), dim=-1)
