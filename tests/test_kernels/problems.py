"""The problems that every implementation of a kernel solves, and the float64 oracles that share no code with any."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from hf_crosscache_kernels import weight_dtypes


@dataclass(frozen=True)
class Translation:
    """One call of `translate_kv`. dims: (layers, heads, head size) of each side; rotary: rotated dimensions of each side, None for all."""

    id: str
    tokens: int = 70
    batch: int = 1
    source: tuple[int, int, int] = (3, 2, 32)
    target: tuple[int, int, int] = (2, 3, 32)
    k: int = 2
    rotary: tuple[int | None, int | None] = (None, None)
    tables: int = 1
    scaling: float = 1.0
    shared: bool = False
    strided: bool = False
    begin: int = 0
    normed: bool = False
    dtype: torch.dtype = torch.float32

    def arguments(self, device: str = "cpu", seed: int = 0) -> dict[str, object]:
        """Random arguments by name; the outputs are full of NaN."""
        g = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=g, device=device)

        (layers, heads, dim), (n, own_heads, own_dim) = self.source, self.target
        rows = self.begin + self.tokens
        states = []
        for _ in range(2 * layers):
            if self.strided:  # the middle of a longer, wider buffer
                states.append(normal(self.batch, heads, rows + 9, dim).to(self.dtype)[:, :, 5 : rows + 5])
            else:
                states.append(normal(self.batch, heads, rows, dim).to(self.dtype))
        if self.shared:
            reads = torch.cartesian_prod(torch.arange(self.k), torch.arange(heads)).int()
            blocks = reads.expand(n, 2, 1, -1, 2).contiguous().to(device)
        else:
            draw = torch.Generator().manual_seed(seed)
            size = (n, 2, own_heads, self.k)
            which = [torch.randint(high, size, generator=draw) for high in (layers, heads)]
            blocks = torch.stack(which, dim=-1).int().to(device)
        width = blocks.shape[3] * dim
        key_dtype, value_dtype = weight_dtypes(self.dtype)
        source_positions = torch.arange(self.tokens, device=device)[None] + torch.arange(self.batch, device=device)[:, None]
        out = torch.full((2, n, self.batch, own_heads, self.tokens + 4, own_dim), float("nan"), device=device).to(self.dtype)
        tables = [self._tables(device, d if r is None else r, b) for r, d, b in zip(self.rotary, (dim, own_dim), (1e4, 5e5), strict=True)]
        return {
            "source_keys": states[:layers],
            "source_values": states[layers:],
            "blocks": blocks,
            "key_weight": (normal(n, own_heads, width, own_dim) / width**0.5).to(key_dtype),
            "value_weight": (normal(n, own_heads, width, own_dim) / width**0.5).to(value_dtype),
            "bias": normal(n, 2, own_heads, own_dim),
            "source_cos": tables[0][0],
            "source_sin": tables[0][1],
            "source_tables": (torch.arange(layers, device=device) % self.tables).int(),
            "source_positions": source_positions.int(),
            "target_cos": tables[1][0],
            "target_sin": tables[1][1],
            "target_tables": (torch.arange(n, device=device) % self.tables).int(),
            "target_positions": (source_positions[:1] + 7).int(),
            "out_keys": out[0, :, :, :, 3:-1],
            "out_values": out[1, :, :, :, 3:-1],
            "flags": torch.zeros((n, 2), dtype=torch.int32, device=device),
            "begin": self.begin,
            "key_norm": 0.5 + torch.rand((n, own_dim), generator=g, device=device) if self.normed else None,
        }

    def _tables(self, device: str, rotary: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = base ** (-torch.arange(0, rotary, 2, device=device).float() / max(rotary, 1))
        angles = torch.arange(self.tokens + self.batch + 8, device=device)[:, None].float() * frequency
        each = [angles * (1 + 0.5 * table) for table in range(self.tables)]
        cos, sin = (torch.stack([f(a) for a in each]) * self.scaling for f in (torch.cos, torch.sin))
        return cos.to(self.dtype), sin.to(self.dtype)


TRANSLATIONS = [
    Translation("plain"),
    Translation("one-token", tokens=1),
    Translation("63-tokens", tokens=63, source=(2, 2, 64), target=(1, 2, 128)),
    Translation("odd-sizes", source=(2, 2, 80), target=(1, 2, 96), k=1),
    Translation("wide", tokens=20, source=(2, 1, 192), target=(1, 1, 256), k=1),
    Translation("narrow", source=(2, 2, 128), target=(2, 2, 64), k=4),
    Translation("k-8", source=(5, 2, 16), target=(1, 2, 16), k=8),
    Translation("partial-rotary", rotary=(16, 8)),
    Translation("partial-rotary-odd", source=(2, 2, 80), target=(1, 1, 80), rotary=(32, 32), k=1),
    Translation("without-source-rope", rotary=(0, None)),
    Translation("without-target-rope", rotary=(None, 0)),
    Translation("yarn-and-two-tables", tables=2, scaling=1.3466),
    Translation("rows-of-a-batch", batch=3),
    Translation("shared", shared=True, k=2),
    Translation("key-norm", normed=True),
    Translation("key-norm-odd", normed=True, source=(2, 2, 80), target=(2, 2, 96), rotary=(None, 32), k=1),
    Translation("strided", strided=True, batch=2),
    Translation("begin", begin=5, batch=2),
    Translation("begin-without-rope", begin=5, rotary=(0, None)),
    Translation("bfloat16", dtype=torch.bfloat16, source=(3, 2, 64), target=(2, 2, 64)),
    Translation("float16", dtype=torch.float16),
]
LONG = [replace(TRANSLATIONS[0], id="1000-tokens", tokens=1000, dtype=torch.bfloat16, source=(4, 2, 128), target=(2, 3, 128), k=4)]


def translation_oracle(a: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The maps in float64, with complex numbers for the rotations: keys and values `[N, B, H, T, D]`."""
    n, batch, heads, tokens, dim = a["out_keys"].shape
    rows = slice(a["begin"], a["begin"] + tokens)
    found = []
    for role in range(2):
        states, weight = (a["source_keys"], a["key_weight"]) if role == 0 else (a["source_values"], a["value_weight"])
        out = torch.empty((n, batch, heads, tokens, dim), dtype=torch.float64, device=a["bias"].device)
        for layer in range(n):
            for head in range(heads):
                parts = []
                for source, source_head in a["blocks"][layer, role, head if a["blocks"].shape[2] > 1 else 0].tolist():
                    x = states[source][:, source_head, rows].double()
                    parts.append(rotated(x, a, "source", a["source_tables"][source], -1) if role == 0 else x)
                y = torch.cat(parts, -1) @ weight[layer, head].double() + a["bias"][layer, role, head].double()
                if role == 0 and a["key_norm"] is not None:
                    y = y / (y * a["key_norm"][layer].double()).square().mean(-1, keepdim=True).sqrt()
                out[layer, :, head] = rotated(y, a, "target", a["target_tables"][layer], 1) if role == 0 else y
        found.append(out)
    return found[0], found[1]


def rotated(x: torch.Tensor, a: dict, side: str, table: torch.Tensor, power: int) -> torch.Tensor:
    at = a[f"{side}_positions"].long()
    turn = torch.complex(*(a[f"{side}_{f}"][table][at].double() for f in ("cos", "sin"))) ** power
    half = turn.shape[-1]
    z = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((z.real, z.imag, x[..., 2 * half :]), -1)


def relative_error(found: torch.Tensor, oracle: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN where anything is."""
    return ((found.double() - oracle).norm() / oracle.norm()).item()


@dataclass(frozen=True)
class Moments:
    """One call of `accumulate_moments`. weight: None, "rows" or "regressions"; together: every source head against all outputs at once."""

    id: str
    tokens: int = 50
    batch: int = 3
    source: tuple[int, int, int] = (3, 2, 32)
    target: tuple[int, int, int] = (2, 2, 16)
    c: int = 2
    rotary: tuple[int, int] = (0, 0)
    weight: str | None = None
    together: bool = False
    dtype: torch.dtype = torch.float32
    names: tuple[str, ...] = field(default=("total", "sum_x", "sum_y", "sum_xx", "sum_xy", "sum_yy"), repr=False)

    def arguments(self, device: str = "cpu", seed: int = 0) -> dict[str, object]:
        g = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=g, device=device)

        (layers, heads, dim), (own_layers, own_heads, own_dim) = self.source, self.target
        source = [(normal(self.batch, heads, self.tokens, dim) + 5 * normal(1, heads, 1, dim)).to(self.dtype) for _ in range(layers)]
        target = [(normal(self.batch, own_heads, self.tokens, own_dim) + 3).to(self.dtype) for _ in range(own_layers)]
        outputs = torch.cartesian_prod(torch.arange(own_layers), torch.arange(own_heads)).int().to(device)
        if self.together:
            blocks = torch.cartesian_prod(torch.arange(layers), torch.arange(heads)).int().to(device)[:, None]
            outputs = outputs[None]
        else:
            draw = torch.Generator().manual_seed(seed)
            picked = [torch.stack([torch.randperm(layers * heads, generator=draw)[: self.c] for _ in range(len(outputs))])]
            blocks = torch.stack((picked[0] // heads, picked[0] % heads), -1).int().to(device)
            outputs = outputs[:, None]
        groups, rows = len(blocks), self.batch * self.tokens
        weight = None
        if self.weight is not None:
            weight = torch.rand((1 if self.weight == "rows" else groups, rows), generator=g, device=device) * 50
        tables = [self._tables(device, rotary) for rotary in self.rotary]
        n, m = blocks.shape[1] * dim, outputs.shape[1] * own_dim
        sizes = {
            "total": (1 if self.weight != "regressions" else groups,), "sum_x": (groups, n), "sum_y": (len(outputs), m),
            "sum_xx": (groups, n, n), "sum_xy": (groups, n, m), "sum_yy": (len(outputs), m),
        }  # fmt: skip
        return {
            "source": source,
            "target": target,
            "source_blocks": blocks,
            "target_blocks": outputs,
            "source_shift": torch.stack([s.float().mean((0, 2)) + 0.3 for s in source]),
            "target_shift": torch.stack([s.float().mean((0, 2)) + 0.3 for s in target]),
            "sample_weight": weight,
            "source_cos": tables[0][0],
            "source_sin": tables[0][1],
            "source_tables": torch.zeros(layers, dtype=torch.int32, device=device),
            "source_positions": torch.arange(self.tokens, dtype=torch.int32, device=device)[None],
            "target_cos": tables[1][0],
            "target_sin": tables[1][1],
            "target_tables": torch.zeros(own_layers, dtype=torch.int32, device=device),
            "target_positions": torch.arange(self.tokens, dtype=torch.int32, device=device)[None],
            **{name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()},
        }

    def _tables(self, device: str, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = 1e4 ** (-torch.arange(0, rotary, 2, device=device).float() / max(rotary, 1))
        angles = torch.arange(self.tokens, device=device)[:, None].float() * frequency
        return (angles.cos() * 1.1)[None].to(self.dtype), (angles.sin() * 1.1)[None].to(self.dtype)


MOMENTS = [
    Moments("plain"),
    Moments("weighted-with-rope", weight="rows", rotary=(32, 8)),
    Moments("weights-of-each-regression", weight="regressions"),
    Moments("screening", together=True, weight="rows"),
    Moments("odd-size", source=(2, 2, 80), tokens=7),
    Moments("two-tiles", source=(2, 2, 128), target=(1, 2, 64), batch=1, tokens=65),
    Moments("bfloat16", dtype=torch.bfloat16, rotary=(32, 16), weight="rows"),
]


def moments_oracle(a: dict) -> dict[str, torch.Tensor]:
    """The sums in float64, one regression after the other."""
    groups = len(a["source_blocks"])
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("sum_x", "sum_y", "sum_xx", "sum_xy", "sum_yy")}
    rows = a["source"][0].shape[0] * a["source"][0].shape[2]
    for group in range(groups):
        panels = []
        for side in ("source", "target"):
            blocks = a[f"{side}_blocks"]
            parts = []
            for layer, head in blocks[group if len(blocks) > 1 else 0].tolist():
                x = a[side][layer][:, head].double()
                x = rotated(x, a, side, torch.tensor(0), -1) if a[f"{side}_cos"].shape[-1] else x
                parts.append((x - a[f"{side}_shift"][layer, head].double()).reshape(rows, -1))
            panels.append(torch.cat(parts, -1))
        x, y = panels
        weight = a["sample_weight"]
        w = torch.ones(rows, dtype=torch.float64, device=x.device) if weight is None else weight[group if len(weight) > 1 else 0].double()
        xw, yw = x * w[:, None], y * w[:, None]
        for name, value in (("sum_x", xw.sum(0)), ("sum_xx", (xw.T @ x).tril()), ("sum_xy", xw.T @ y)):
            found[name].append(value)
        if group < len(a["sum_y"]):
            found["sum_y"].append(yw.sum(0))
            found["sum_yy"].append((yw * y).sum(0))
    weight = a["sample_weight"]
    total = torch.tensor([float(rows)], device=x.device) if weight is None else weight.double().sum(1)
    return {"total": total.double(), **{name: torch.stack(values) for name, values in found.items()}}
