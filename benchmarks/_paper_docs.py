"""Writes the section "Against the paper" of `docs/simulator.md`, between its markers, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- paper: begin -->", "<!-- paper: end -->"
Rows = Sequence[Mapping[str, Any]]
WIDTHS = (1536, 3584, 5120)
"""Of the 1.5B, the 7B, and the 14B and 32B models."""


def write_docs(docs: Path, constants: Any, rows: Rows) -> None:
    """The tables and the picture. Without markers in the page the section is put at its end."""
    page = docs / "simulator.md"
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n## Against the paper\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{tables(constants, rows)}\n{END}{after}", encoding="utf-8")
    draw(docs / "paper.png", rows)


def tables(constants: Any, rows: Rows) -> str:
    """What is fitted, and then everything, in the order of the issue."""
    parts = (fitted(constants), speedups(rows), few_constants(rows), splits(rows), staleness(rows), interruption(rows))
    return "\n\n".join("\n".join(lines) for lines in (*parts, scaling(rows)) if lines)


def fitted(constants: Any) -> list[str]:
    """Each constant, its figure, and whether it can be."""
    wide = {width: constants.train_flops_share * width / (width + constants.train_half_width) for width in WIDTHS}
    shares = ", ".join(f"{share:.0%} at {width:,}" for width, share in wide.items())
    return [
        "| fitted | value | on | |",
        "|---|---|---|---|",
        f"| `costs.decode_overhead` | {1000 * constants.decode_overhead:.1f} ms | 1.5B, tokens a second at η = 0 | the "
        "default is 4 ms |",
        f"| `costs.train_flops_share`, `train_half_width` | {constants.train_flops_share:.2f}, "
        f"{constants.train_half_width:,.0f} | 1.5B and 7B, asynchronous hours | utilisation (recomputation counted, "
        f"tensor parallelism not) is {shares} wide |",
        f"| `costs.switch_seconds` | {constants.switch_seconds:.0f} s | 1.5B, synchronous hours | twice a step: "
        "all else that the synchronous system does between generating and training |",
        f"| `lengths.mean` of code | {constants.code_mean:,.0f} tokens | 14B, asynchronous hours | of maths it is "
        f"{constants.mean:,.0f}, which follows from the paper's own 14.8 h and 371.7 thousand tokens a second |",
    ]


def speedups(rows: Rows) -> list[str]:
    """The paper's table."""
    lines = [
        "| run | synchronous, h (paper) | off by | asynchronous, h (paper) | off by | speed-up | paper | off by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in _of(rows, "table"):
        lines.append(
            f"| {r['case']} | {r['sync_hours']:.1f} ({r['sync_paper']:.1f}) | "
            f"{'fitted' if r['fitted'] else format(r['sync_error'], '+.0%')} | {r['async_hours']:.1f} "
            f"({r['async_paper']:.1f}) | {'fitted' if r['async_fitted'] else format(r['async_error'], '+.0%')} | "
            f"**{r['predicted']:.2f}** | {r['paper']:.2f} | {_off(r)} |"
        )
    others = ", ".join(f"{r['sync_without_switch']:.1f} ({r['other_paper']:.1f})" for r in _of(rows, "table"))
    return [
        *lines,
        "",
        "The paper has hours of another synchronous system too (verl), which is faster than its own. Without time for "
        f"changing over the simulation says {others}.",
    ]


def few_constants(rows: Rows) -> list[str]:
    """In one sentence."""
    few = _of(rows, "two constants")
    if not few:
        return []
    speeds = ", ".join(f"{r['predicted']:.2f} ({r['error']:+.0%})" for r in few[1:])
    return [
        "With two constants alone, both fitted on the first row (one utilisation for all models; "
        f"`decode_overhead = {1000 * few[0]['decode_overhead']:.1f}` ms, on the synchronous hours), the other "
        f"speed-ups are {speeds}."
    ]


def splits(rows: Rows) -> list[str]:
    """What hangs on how models are split."""
    found = _of(rows, "split")
    if not found:
        return []
    lines = [
        "How models were split is not said. Here engines are of 1, 1, 1 and 2 devices and the trainer's ranks of 1, 2, "
        "4 and 8: the fewest on which half of the memory is left. Split otherwise (and fitted anew):",
        "",
        "| | answers of code | speed-up: 7B | 14B | 32B |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["split"] for r in found):
        own = [r for r in found if r["split"] == name]
        speeds = " | ".join(f"{r['predicted']:.2f} ({r['error']:+.0%})" for r in own)
        lines.append(f"| {name} | {own[0]['code_mean']:,.0f} | {speeds} |")
    return lines


def staleness(rows: Rows) -> list[str]:
    """Throughput against η."""
    lines = [
        "| η (1.5B) | thousand trained tokens a second | paper | off by | trainer waits |",
        "|---|---|---|---|---|",
    ]
    for r in _of(rows, "eta"):
        lines.append(
            f"| {r['case']} | {r['predicted']:.1f} | {r['paper']:.1f} | {_off(r)} | {r['trainer_waits']:.0%} |"
        )
    return lines


def interruption(rows: Rows) -> list[str]:
    """What it is worth, against two ways to do without."""
    lines = [
        "| interruption, 4 nodes | generated tokens a second, against engines that all wait for the longest answer "
        "| paper | against engines that wait each for their own |",
        "|---|---|---|---|",
    ]
    for r in _of(rows, "interruption"):
        lines.append(f"| {r['case']} | {r['predicted']:+.0%} | {r['paper']:+.0%} | {r['each_on_its_own']:+.0%} |")
    return lines


def scaling(rows: Rows) -> list[str]:
    """Against the number of devices."""
    lines = [
        "| devices (1.5B, same batch) | thousand trained tokens a second | of linear | synchronous | trainer waits | "
        "answers in an engine |",
        "|---|---|---|---|---|---|",
    ]
    for r in _of(rows, "scaling"):
        lines.append(
            f"| {r['case']} | {r['predicted']:.0f} | {r['of_linear']:.0%} | {r['sync_tokens']:.0f} | "
            f"{r['trainer_waits']:.0%} | {r['running']:.0f} |"
        )
    return lines


def draw(path: Path, rows: Rows) -> None:
    """Speed-ups, throughput against η, throughput against devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    table = _of(rows, "table")
    at = range(len(table))
    left.bar([x - 0.2 for x in at], [r["paper"] for r in table], 0.4, label="paper", color="#b0b0b0")
    left.bar([x + 0.2 for x in at], [r["predicted"] for r in table], 0.4, label="simulated", color="#1f6fa8")
    left.set_xticks(list(at), [r["case"] for r in table])
    left.set_title("asynchronous, times as fast as synchronous")
    left.legend(frameon=False)
    curve = _of(rows, "eta")
    names = [r["case"] for r in curve]
    middle.plot(names, [r["paper"] for r in curve], "o--", color="#808080", label="paper")
    middle.plot(names, [r["predicted"] for r in curve], "o-", color="#1f6fa8", label="simulated")
    middle.set(title="1.5B on 128 devices", xlabel="η", ylabel="thousand trained tokens a second", ylim=(0, None))
    middle.legend(frameon=False)
    scaling = _of(rows, "scaling")
    sizes = [int(r["case"].split()[0]) for r in scaling]
    tokens = [r["predicted"] for r in scaling]
    right.plot(sizes, [tokens[0] * n / sizes[0] for n in sizes], "--", color="#808080", label="linear")
    right.plot(sizes, tokens, "o-", color="#1f6fa8", label="asynchronous, η = 8")
    right.plot(sizes, [r["sync_tokens"] for r in scaling], "o-", color="#c9a227", label="synchronous, colocated")
    right.set(xscale="log", yscale="log", xlabel="devices", title="1.5B, the same batch on more devices")
    right.set_xticks(sizes, [str(n) for n in sizes])
    right.minorticks_off()
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _of(rows: Rows, what: str) -> Rows:
    return [row for row in rows if row["what"] == what]


def _off(row: Mapping[str, Any]) -> str:
    return "fitted" if row["fitted"] else f"{row['error']:+.0%}"
