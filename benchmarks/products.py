"""How many tokens a second the matrix products of a model allow: the bound of any engine on one core, by two ways.

    python benchmarks/products.py [--quick] [--dtype bfloat16|float32]

Every linear layer of SmolLM2-135M's shape, its output head with them, one after the other for so many rows at once: by
`torch.nn.functional.linear`, as transformers' models do, and by the embedded engine's own layers, which lay the large
weights out for oneDNN before (`fleuve/engine/linear.py`). One thread, turn about. What attention, sampling and
everything else takes comes on top, so that no engine reaches these figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from _report import report, spread
from step_cost import SHAPE
from torch import Tensor
from torch.nn.functional import linear

from fleuve.engine.linear import pack_linears

ROWS = (1, 8, 32, 64)


def weights(dtype: torch.dtype) -> list[Tensor]:
    """`[outputs, inputs]` of each linear layer in order."""
    of = cast(dict[str, int], SHAPE)
    hidden, wide = of["hidden_size"], of["intermediate_size"]
    kv = hidden // of["num_attention_heads"] * of["num_key_value_heads"]
    layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (wide, hidden), (wide, hidden)]
    layer.append((hidden, wide))
    shapes = layer * of["num_hidden_layers"] + [(of["vocab_size"], hidden)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def engine_layers(all_of_them: list[Tensor]) -> torch.nn.ModuleList:
    """As the engine has them after `pack_linears`."""
    layers = torch.nn.ModuleList()
    for weight in all_of_them:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight)
        layers.append(layer)
    pack_linears(layers)
    return layers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else 5
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    all_of_them = weights(dtype)
    began = time.perf_counter()
    layers = engine_layers(all_of_them)
    packing = time.perf_counter() - began

    def plain(inputs: dict[int, Tensor]) -> None:
        for weight in all_of_them:
            linear(inputs[weight.shape[1]], weight)

    def packed(inputs: dict[int, Tensor]) -> None:
        for layer, weight in zip(layers, all_of_them, strict=True):
            layer(inputs[weight.shape[1]])

    ways = {"linear": plain, "packed": packed}
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for count in ROWS:
            inputs = {width: torch.randn(count, width, dtype=dtype) for width in {w.shape[1] for w in all_of_them}}
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(rounds + 1):
                for name, run in ways.items():
                    began = time.perf_counter()
                    run(inputs)
                    if number:
                        taken[name].append(time.perf_counter() - began)
            ratios = spread([a / b for a, b in zip(taken["linear"], taken["packed"], strict=True)])
            rows.append({"rows": count})
            rows[-1] |= {f"{name}, tokens/s": count / spread(seconds)["median"] for name, seconds in taken.items()}
            rows[-1] |= {"ratio": ratios["median"], "min": ratios["min"], "max": ratios["max"]}
    headline = {"dtype": options.dtype, "ratio": {row["rows"]: round(row["ratio"], 2) for row in rows}}
    report("products", {**headline, "seconds to pack": round(packing, 3)}, rows)


if __name__ == "__main__":
    main()
