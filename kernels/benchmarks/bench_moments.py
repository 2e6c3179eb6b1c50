"""Time `accumulate_moments`: the statistics of Qwen3-14B -> Qwen3-32B from captured states, as rows of `results/moments.csv`.

    python kernels/benchmarks/bench_moments.py [--rows 128000] [--commit COMMIT]

Both roles of all 64 target layers, head support k = 8, weighted rows, keys with their RoPE, states in bfloat16. Before it is timed the
result for some rows is held against float64 sums. `tokens` is the number of rows; a row's bytes are its states, read once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from harness import RESULTS, side

from hf_crosscache import ops
from hf_crosscache.benchmark import Problem, Row, append, copy_bandwidth, spread, table, versions
from hf_crosscache.moments import WeightedMoments
from hf_crosscache.rope import NO_ROTATION

WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS / "moments.csv")
    parser.add_argument("--rows", type=int, default=128_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="", help="what the rows say of the code that ran")
    args = parser.parse_args()
    device = torch.device("cuda")
    copy = copy_bandwidth(device)
    states = Captured(args.rows // WINDOW, device)
    error = states.relative_error()
    if not error < 1e-3:
        raise SystemExit(f"relative error {error:.2g} against float64 sums")
    scratch = states.scratch_gib()
    times = []
    for _ in range(args.repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        states.accumulate()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    p20, p50, p80 = (round(value, 2) for value in spread(times[1:]))
    rows = states.batch * WINDOW
    rate = rows * states.row_bytes / p50 / 1e6
    row = Row(
        f"moments, {scratch:.2f} GiB of scratch", "Qwen3-14B", "Qwen3-32B", "head", 8, states.batch, rows, "bfloat16", "triton", p20, p50,
        p80, round(rate, 1), round(100 * rate / copy, 1), None, None, float(f"{error:.3g}"), *versions(device), args.commit,
    )  # fmt: skip
    print(table([row]))
    append(args.csv, [row])


class Captured:
    """States of both models on the same windows, as cached, and the moments that they go into."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        sides = [side(name, device, timed=False).geometry for name in ("Qwen3-14B", "Qwen3-32B")]
        problem = Problem(*sides, support="head", k=8, batch=1, tokens=WINDOW, dtype=torch.bfloat16, device=device)
        self.rotations, self.positions = problem.rotations, problem.position_ids
        heads, dim = sides[0].layers[0].num_key_value_heads, sides[0].layers[0].head_dim
        generator = torch.Generator(device).manual_seed(0)

        def captured(layers: int) -> list[torch.Tensor]:
            size = (batch, heads, WINDOW, dim)
            return [torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).add_(2.0) for _ in range(layers)]

        self.states = [[captured(len(geometry)) for geometry in sides] for _ in range(2)]
        self.row_bytes = sum(2 * heads * dim * 2 * len(geometry) for geometry in sides)
        self.blocks = [problem.blocks[:, role].flatten(0, 1).to(device) for role in range(2)]
        layers = torch.arange(len(sides[1]), device=device)
        self.outputs = torch.cartesian_prod(layers, torch.arange(heads, device=device)).int()[:, None]
        self.weight = torch.rand((1, batch * WINDOW), generator=generator, device=device) + 0.1
        self.shifts = [[torch.stack([layer[:1].float().mean((0, 2)) for layer in layers]) for layers in role] for role in self.states]

    def accumulate(self, role: int | None = None, windows: int | None = None) -> list[WeightedMoments]:
        """Gather the moments of keys and values, one after the other into the same memory where both are wanted."""
        found = []
        rows = slice(None) if windows is None else slice(windows)
        weight = self.weight[:, : self.batch * WINDOW if windows is None else windows * WINDOW]
        for this in (0, 1) if role is None else (role,):
            source, target = ([layer[rows] for layer in layers] for layers in self.states[this])
            shifts = [
                shift[blocks[..., 0].long(), blocks[..., 1].long()].flatten(1)
                for shift, blocks in zip(self.shifts[this], (self.blocks[this], self.outputs), strict=True)
            ]
            moments = WeightedMoments.about(*shifts)
            tables = (
                self.rotations if this == 0 else [(*NO_ROTATION.cos_sin(1, torch.bfloat16, self.device), r[2] * 0) for r in self.rotations]
            )
            ops.accumulate_moments(
                source, target, self.blocks[this], self.outputs, *self.shifts[this], weight, tables[0], self.positions, tables[1],
                self.positions, moments.sums,
            )  # fmt: skip
            found = [moments] if role is not None else []
        return found

    def relative_error(self, windows: int = 8) -> float:
        """Hold one regression of each role, over some windows, against float64 sums."""
        worst = 0.0
        for role in range(2):
            (moments,) = self.accumulate(role, windows)
            weight = self.weight[0, : windows * WINDOW].double()
            for group in (0, 300, 511):
                panels = []
                for at, blocks in enumerate((self.blocks[role][group], self.outputs[group])):
                    parts = []
                    for layer, head in blocks.tolist():
                        x = self.states[role][at][layer][:windows, head].double()
                        if role == 0:
                            cos, sin, index = self.rotations[at]
                            x = times(x, 1 / torch.complex(cos[index[layer], :WINDOW].double(), sin[index[layer], :WINDOW].double()))
                        parts.append((x - self.shifts[role][at][layer, head].double()).reshape(-1, x.shape[-1]))
                    panels.append(torch.cat(parts, -1))
                x, y = panels
                xw = x * weight[:, None]
                for got, want in ((moments.sum_xx[group].tril(), (xw.T @ x).tril()), (moments.sum_xy[group], xw.T @ y)):
                    worst = max(worst, ((got - want).norm() / want.norm()).item())
        return worst

    def scratch_gib(self) -> float:
        """Peak memory beside the states and the moments."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        (moments,) = self.accumulate(0, 16)
        held = sum(t.numel() * t.element_size() for t in (*moments.sums, moments.shift_x, moments.shift_y))
        return (torch.cuda.max_memory_allocated() - before - held) / 2**30


def times(states: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    half = turn.shape[-1]
    turned = torch.complex(states[..., :half], states[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


if __name__ == "__main__":
    main()
