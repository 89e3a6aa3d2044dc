"""Writes the section "Against the paper" of `docs/simulator.md`, between its markers, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- paper: begin -->", "<!-- paper: end -->"
Rows = Sequence[Mapping[str, Any]]


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
    """In the order of the issue."""
    lines = [
        "Fitted, on the first row alone: the trainer's utilisation, `train_flops_share = "
        f"{constants.train_flops_share:.3f}` (on 14.8 h), and `decode_overhead = {constants.decode_overhead:.4f}` s "
        f"(on 41.0 h). The mean answer, {constants.mean:,.0f} tokens, follows from the paper's own 14.8 h and 371.7 "
        "thousand tokens a second.",
        "",
        "| run | synchronous, h (paper) | asynchronous, h (paper) | speed-up | paper | off by |",
        "|---|---|---|---|---|---|",
    ]
    for r in _of(rows, "table"):
        lines.append(
            f"| {r['case']} | {r['sync_hours']:.1f} ({r['sync_paper']:.1f}) | {r['async_hours']:.1f} "
            f"({r['async_paper']:.1f}) | **{r['predicted']:.2f}** | {r['paper']:.2f} | {_off(r)} |"
        )
    if own := _of(rows, "own utilisation"):
        lines += [
            "",
            "With one more constant a row, the trainer's utilisation fitted on that row's asynchronous hours; what is "
            "left to predict is the synchronous hours, and so the speed-up:",
            "",
            "| run | utilisation | synchronous, h (paper) | asynchronous, h (fitted) | speed-up | paper | off by |",
            "|---|---|---|---|---|---|---|",
        ]
        for r in own:
            lines.append(
                f"| {r['case']} | {r['train_flops_share']:.2f} | {r['sync_hours']:.1f} ({r['sync_paper']:.1f}) | "
                f"{r['async_hours']:.1f} ({r['async_paper']:.1f}) | **{r['predicted']:.2f}** | {r['paper']:.2f} | "
                f"{r['error']:+.0%} |"
            )
    lines += [
        "",
        "| η (1.5B) | thousand trained tokens a second | paper | off by | trainer waits |",
        "|---|---|---|---|---|",
    ]
    for r in _of(rows, "eta"):
        lines.append(
            f"| {r['case']} | {r['predicted']:.1f} | {r['paper']:.1f} | {_off(r)} | {r['trainer_waits']:.0%} |"
        )
    if other := _of(rows, "fitted on η = 0"):
        lines += [
            "",
            f"With the overhead of a step fitted on η = 0 instead ({1000 * other[0]['decode_overhead']:.1f} ms): "
            + ", ".join(f"η = {r['case']}: {r['predicted']:.1f} ({r['paper']:.1f})" for r in other)
            + f"; the synchronous run {other[0]['sync_hours']:.1f} h ({other[0]['sync_paper']:.1f}).",
        ]
    lines += ["", "| interruption, 4 nodes | generated tokens a second | paper |", "|---|---|---|"]
    lines += [f"| {r['case']} | {r['predicted']:+.0%} | {r['paper']:+.0%} |" for r in _of(rows, "interruption")]
    lines += [
        "",
        "| devices (1.5B, same batch) | thousand trained tokens a second | of linear | synchronous | trainer waits | "
        "answers in an engine |",
        "|---|---|---|---|---|---|",
    ]
    for r in _of(rows, "scaling"):
        lines.append(
            f"| {r['case']} | {r['predicted']:.0f} | {r['of_linear']:.0%} | {r['sync_tokens']:.0f} | "
            f"{r['trainer_waits']:.0%} | {r['running']:.0f} |"
        )
    return "\n".join(lines)


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
