"""How every benchmark reports: JSON beside it, a table for people, and one JSON line last."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

QUICK = "quick"
"""The key by which a file says that it is of a quick run."""


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores that this process may use, versions, accelerator."""
    import torch
    import transformers

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
        flags: list[str] = next((line.split() for line in lines if line.startswith("flags")), [])
        wide = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
        cpu += "".join(f" {name}" for name in wide or [n for n in ("avx512f", "avx2") if n in flags][:1])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def is_quick(words: Sequence[str]) -> bool:
    """Whether a benchmark's command line asks for a quick run; argparse takes a flag's beginning for it, too."""
    return any(len(word) > 2 and "--quick".startswith(word) for word in words)


def result_path(results: Path, name: str, quick: bool) -> Path:
    """Where a result goes: that of a quick run never in the place of a full run's."""
    path = results / f"{name}.json"
    if not quick or not path.exists():
        return path
    try:
        known = json.loads(path.read_text())
    except ValueError:
        known = {}
    return path if isinstance(known, dict) and known.get(QUICK) else results / f"{name}.quick.json"


def report(name: str, headline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `benchmarks/results/NAME.json`, print `rows` as a table, and last the line that the design asks for.

    A quick run (`--quick` on the command line) is no measurement: where there is a full run's file it is left as it is,
    and `NAME.quick.json` is written.

    Args: `headline`: the figures one would quote; `rows`: one mapping a line of the table, the keys of all together
    are the columns.
    """
    document = {"benchmark": name, "headline": dict(headline), "machine": machine()}
    RESULTS.mkdir(exist_ok=True)
    quick = is_quick(sys.argv[1:])
    path = result_path(RESULTS, name, quick)
    kind = {QUICK: True} if quick else {}
    path.write_text(json.dumps({**document, **kind, "rows": [dict(r) for r in rows]}, indent=2) + "\n")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for number, line in enumerate(cells):
        print(
            "  ".join(
                text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
            )
        )
        if number == 0:
            print("  ".join("-" * w for w in widths))
    print(f"written to {path}")
    print(json.dumps(document))
