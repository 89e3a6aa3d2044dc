"""`fleuve replay-step`: the batch of a step that could not be learnt from, taken again with every number looked at."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.observe.failed import FailedStep, failed_files, read_failed
from fleuve.train.replay import AnswerFinding, MinibatchFinding, replay
from fleuve.train.trainer import Trainer
from fleuve.weights.store import WeightStore

SHOWN = 8
"""Rows of answers in which nothing is wrong: those with the largest gradients."""

_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Weights:
    """The weights to take a step from: those of `version`, in a checkpoint or (None) the initial model. `exact`: they
    are those that the step began with, bit for bit."""

    version: int
    path: Path | None
    exact: bool


def replay_step(path: Path, step: int | None) -> str:
    """What there is to say of a step, as lines. `path` is a run directory (whose newest failed step it is, unless
    `step` says another) or a file of its `failed/`.

    Raises:
        UserError: there is no such step, or it cannot be taken again.
    """
    file = _file(path, step)
    failed = read_failed(file)
    run = file.absolute().parent.parent
    settings = Settings.model_validate(failed.settings)
    weights = weights_of_step(run, failed)
    with tempfile.TemporaryDirectory() as scratch:
        store = WeightStore(Path(scratch) / "weights", 1)
        try:
            trainer = Trainer(settings, store)
            if weights.path is not None:
                trainer.load(weights.path)
            findings = replay(trainer, failed.batch)
        finally:
            store.close()
    return "\n".join([*_introduction(failed, weights), *_table(findings)])


def weights_of_step(run: Path, failed: FailedStep) -> Weights:
    """The nearest to those that the step began with: the same, if any checkpoint (or the initial model) has them;
    those of the latest before it otherwise, and else of the first after it."""
    wanted = failed.batch.version
    unchanged = {f.step for f in map(read_failed, failed_files(run)) if f.unchanged}
    there = [Weights(0, None, False)]
    for marker in (run / "checkpoints").glob("step-*/COMMITTED"):
        if found := _STEP.fullmatch(marker.parent.name):
            there.append(Weights(int(found[1]), marker.parent, False))

    def same(version: int) -> bool:
        """No step between the two changed anything."""
        first, last = sorted((version, wanted))
        return all(step in unchanged for step in range(first + 1, last + 1))

    def distance(weights: Weights) -> tuple[bool, bool, int]:
        return not same(weights.version), weights.version > wanted, abs(weights.version - wanted)

    best = min(there, key=distance)
    return Weights(best.version, best.path, same(best.version))


def _file(path: Path, step: int | None) -> Path:
    if path.is_file():
        if step is not None:
            raise UserError(f"--step {step}: {path} is the file of one step already")
        return path
    files = {int(f.stem.removeprefix("step-")): f for f in failed_files(path)}
    if not files:
        raise UserError(f"{path}: has no failed/step-*.msgpack: no update of its last steps was skipped for a NaN")
    if step is not None and step not in files:
        raise UserError(f"--step {step}: {path} has no such failed step, only {', '.join(map(str, files))}")
    return files[max(files) if step is None else step]


def _introduction(failed: FailedStep, weights: Weights) -> list[str]:
    where = "the initial model" if weights.path is None else str(weights.path)
    began = failed.batch.version
    note = f"those that the step began with ({where})"
    if not weights.exact:
        note = (
            f"of version {weights.version} ({where}); the step began with version {began}, which no checkpoint has: "
            "what follows may differ from what happened"
        )
    groups = failed.batch.groups
    answers = sum(len(group.trajectories) for group in groups)
    return [f"step {failed.step}: {len(groups)} groups, {answers} answers", f"weights: {note}"]


def _table(findings: Sequence[MinibatchFinding]) -> list[str]:
    lines = []
    for number, m in enumerate(findings, start=1):
        if m.loss is None:
            lines.append(f"update {number}: nothing to learn")
        else:
            norms = [n for n in (m.norm, m.critic_norm) if n is not None]
            refused = not all(map(math.isfinite, [m.loss, *norms]))
            shown = f"loss {m.loss:.6g}, gradient {m.norm:.6g}"
            shown += "" if m.critic_norm is None else f", the critic's {m.critic_norm:.6g}"
            lines.append(f"update {number}: {shown}{': skipped' if refused else ''}")
            if refused and all(a.finite for a in m.answers):
                lines.append("  every answer by itself is finite: they are not when added up")
        broken = [a for a in m.answers if not a.finite]
        rest = sorted((a for a in m.answers if a.finite), key=lambda a: -a.norm)
        shown_rest = rest[: max(0, SHOWN - len(broken))]
        rows = [_HEAD, *map(_row, [*broken, *shown_rest])]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if len(rest) > len(shown_rest):
            lines.append(f"  and {len(rest) - len(shown_rest)} more without anything wrong, of smaller gradients")
    if all(a.finite for m in findings for a in m.answers):
        lines.append("every number is finite this time")
    return lines


_HEAD = ("group", "prompt", "answer", "tokens", "reward", "loss", "gradient", "first that is not finite")


def _row(a: AnswerFinding) -> tuple[str, ...]:
    reward = "none" if a.reward is None else f"{a.reward:g}"
    numbers = (f"{a.loss:.4g}", f"{a.norm:.4g}")
    return str(a.group), a.prompt, str(a.answer), str(a.tokens), reward, *numbers, _first(a)


def _first(a: AnswerFinding) -> str:
    if a.first is not None:
        f = a.first
        return f"{f.part} {f.value} of token {f.index} (id {f.token}, version {f.version})"
    if not math.isfinite(a.loss):
        return "the loss"
    return f"the gradient, in {a.parameter}" if a.parameter else ""
