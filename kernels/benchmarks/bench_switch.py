"""Time a switch of models: the target's own prefill against the translation of the source's cache, as rows of a CSV file.

    python kernels/benchmarks/bench_switch.py SOURCE TARGET TRANSLATOR --texts texts.jsonl.xz

Both times are medians of wall time around a synchronised call: `prefill_ms` of the target's decoder over the context, without its
language-model head; `translate_ms` of building a `TranslatedCache`, native first tokens included, and translating all its layers. In the
same run one layer is held against a float64 oracle that shares no code with the library; a relative error above the cache dtype's
rounding ends the run.
"""

import argparse
import csv
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_crosscache import CacheTranslator, TranslatedCache, first_layers
from hf_crosscache.compat import prefill, states_of
from hf_crosscache.texts import read_documents

RESULTS = Path(__file__).parent / "results" / "switch.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "target", "translator"):
        parser.add_argument(name)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", default="", help="what the rows say of the code that ran")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    place = {"dtype": torch.bfloat16, "device_map": "cuda"} if cuda else {"dtype": torch.float32}
    source, target = (AutoModelForCausalLM.from_pretrained(n, **place).eval() for n in (args.source, args.target))
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    translator = CacheTranslator.from_pretrained(args.translator, target_model=target, tokenizer=tokenizer)
    translator = translator.to(source.device)
    documents = zip(read_documents(args.texts), range(max(args.tokens) // 100 + 1), strict=False)
    text = "\n".join(document.text for document, _ in documents)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids.to(target.device)

    rows = list(measure(source, target, translator, ids, args.tokens, args.repeats, args.commit))
    is_new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def measure(source, target, translator: CacheTranslator, ids: torch.Tensor, lengths: list[int], repeats: int, commit: str):
    """Yield a row a context length, each after its correctness check."""
    cuda = ids.device.type == "cuda"
    for tokens in lengths:
        prompt = ids[:, :tokens]
        pairs = states_of(prefill(source, prompt)[0])

        def translate(prompt=prompt, pairs=pairs):
            return list(TranslatedCache(pairs, translator, target_model=target, input_ids=prompt))

        error = relative_error(translate(), pairs, translator, target, prompt, layer_idx=len(translator.target.geometry) // 2)
        if error > (5e-3 if cuda else 1e-5):
            raise SystemExit(f"{tokens} tokens: translated layer is {error:.2g} from the float64 oracle")
        native_ms = median_ms(lambda prompt=prompt: prefill(target, prompt), repeats)
        translate_ms = median_ms(translate, repeats)
        row = {
            "source": Path(translator.source.name).name,
            "target": Path(translator.target.name).name,
            "support": translator.summary["support"],
            "k": translator.summary["k"],
            "native_layers": translator.native_layers,
            "native_features": 0 if translator.features is None else translator.features.width,
            "context_tokens": prompt.shape[1],
            "prefill_ms": round(native_ms, 2),
            "translate_ms": round(translate_ms, 2),
            "times_faster": round(native_ms / translate_ms, 1),
            "relative_error": f"{error:.2g}",
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": commit,
        }
        print(row, flush=True)
        yield row


def median_ms(run, repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times[3:])[repeats // 2]


def relative_error(layers: list, pairs: list, translator: CacheTranslator, target, prompt: torch.Tensor, layer_idx: int) -> float:
    """Hold one translated layer against the same affine maps in float64, with complex numbers for the rotations."""
    skip = translator.sink_tokens
    worst = 0.0
    stripped = [stripped_keys(keys, table) for (keys, _), table in zip(pairs, translator.source.geometry.rotary, strict=True)]
    values = [states.double() for _, states in pairs]
    behind = features_of(translator, stripped, values, pairs[0][0].dtype, target, prompt)
    rounded = [keys.to(pairs[0][0].dtype).double() for keys in stripped]
    read_of = [*stripped, *behind, *values], [*values, *behind, *rounded]
    for role, layer_map in enumerate(translator.maps(layer_idx)):
        found = layers[layer_idx][role]
        length, dtype = found.shape[2], found.dtype
        turn_on = turn(translator.target.geometry.rotary[layer_idx], length, dtype, found.device)
        for head in range(found.shape[1]):
            read = layer_map.blocks[head if len(layer_map.blocks) > 1 else 0]
            x = torch.cat([read_of[role][layer][:, source_head, :length] for layer, source_head in read], dim=-1)
            x = x - layer_map.mean_x[head if len(layer_map.blocks) > 1 else 0].double()
            y = x @ layer_map.weight[head].double() + layer_map.mean_y[head].double()
            if role == 0 and translator.key_norm is not None:
                unweighted = y * translator.key_norm[layer_idx].to(y)
                y = y / unweighted.square().mean(-1, keepdim=True).sqrt()
            y = as_real(as_complex(y) * turn_on) if role == 0 else y
            got, want = found[:, head, skip:].double(), y[:, skip:]
            worst = max(worst, ((got - want).norm() / want.norm()).item())
    return worst


def features_of(translator: CacheTranslator, stripped: list, values: list, dtype: torch.dtype, target, prompt) -> list[torch.Tensor]:
    """What maps read beside source heads, in the shape of the source's layers, from the formulas; factors are rounded as a cache is."""
    kinds = []
    if translator.features is not None:
        given = {"input_ids": prompt, "position_ids": torch.arange(prompt.shape[1], device=prompt.device)[None].expand_as(prompt)}
        hidden = first_layers.run(target, translator.native_layers, given).hidden.double()
        kinds.append((hidden - translator.features.mean.to(hidden)) @ translator.features.projection.to(hidden))
    if translator.source_features is not None:
        x = torch.cat([side.transpose(1, 2).flatten(2) for side in (*stripped, *values)], dim=-1)
        centred = (x - translator.source_features.mean.to(x)).to(dtype).double()
        kinds.append(centred @ translator.source_features.projection.to(x.device, dtype).double())
    if translator.nonlinear_features is not None:
        units, z = translator.nonlinear_features, torch.cat(kinds, dim=-1)
        kinds.append((torch.nn.functional.gelu(z @ units.weight.to(z) + units.bias.to(z)) - units.mean.to(z)) * units.scale.to(z))
    if not kinds:
        return []
    _, heads, _, dim = values[0].shape
    flat = torch.cat(kinds, dim=-1).to(dtype).double()
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[-1] % (heads * dim)))
    return list(flat.unflatten(-1, (-1, heads, dim)).permute(2, 0, 3, 1, 4))


def stripped_keys(keys: torch.Tensor, table) -> torch.Tensor:
    return as_real(as_complex(keys.double()) / turn(table, keys.shape[2], keys.dtype, keys.device))


def turn(table, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    angles = torch.arange(length, device=device)[:, None].float() * table.inv_freq.to(device)
    scale = table.attention_scaling
    return torch.complex(*((f(angles) * scale).to(dtype).double() for f in (torch.cos, torch.sin)))


def as_complex(states: torch.Tensor) -> torch.Tensor:
    return torch.complex(*states.chunk(2, dim=-1))


def as_real(states: torch.Tensor) -> torch.Tensor:
    return torch.cat((states.real, states.imag), dim=-1)


if __name__ == "__main__":
    main()
