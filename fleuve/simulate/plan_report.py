"""What `fleuve plan` prints, and the settings file that it writes."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fleuve.config.loader import dump_changes
from fleuve.config.settings import Settings
from fleuve.errors import UserError
from fleuve.simulate.candidates import longest_sequence
from fleuve.simulate.engine_costs import model_shape_of
from fleuve.simulate.hardware import load_hardware
from fleuve.simulate.layout import layout_of
from fleuve.simulate.lengths import DEFAULT_MEAN
from fleuve.simulate.memory import engine_memory, trainer_memory
from fleuve.simulate.outputs import beside, check_output
from fleuve.simulate.plan import Plan, Planned
from fleuve.simulate.planned_run import unready


def print_plan(planned: Planned, console: Console) -> None:
    """The best plan and the others, what staleness is worth, and what if answers are not as assumed."""
    best = planned.best
    run = best.settings
    console.print(
        f"{model_shape_of(run).name} on {run.simulate.gpus} × {run.simulate.hardware}: {run.steps} steps of "
        f"{run.control.batch_size} prompts × {run.rollout.group_size} answers, sequences of up to "
        f"{longest_sequence(run):,} tokens",
        soft_wrap=True,
    )
    console.print(_assumption(run), soft_wrap=True)
    console.print(_comparison(planned, _table(console)))
    console.print(_staleness(planned, _table(console)))
    if planned.sensitivity:
        console.print(_sensitivity(planned, _table(console)))
    for line in _notes(planned):
        console.print(line, soft_wrap=True)


def check_writable(path: Path) -> None:
    """Before the search, which takes a while.

    Raises:
        UserError: there is such a file already, or none can be made there.
    """
    if path.exists():
        raise UserError(f"--write {path}: there is such a file already; give another name, or remove it")
    check_output("--write", path)


def write_plan(path: Path, plan: Plan) -> None:
    """The plan as a settings file.

    Raises:
        UserError: it cannot be written.
    """
    temporary = beside(path)
    try:
        temporary.write_text(plan_text(plan), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"--write {path}: cannot be written: {error.strerror}") from None


def plan_text(plan: Plan) -> str:
    """The plan as TOML: what is not at its default, and what the cluster is."""
    settings, layout = plan.settings, layout_of(plan.settings)
    where = "in turn on the same devices" if layout.colocated else "at the same time"
    head = [
        f"# A plan of `fleuve plan`: {plan.hours:.1f} hours predicted for {settings.steps} steps; `fleuve simulate` on",
        f"# this file says more. Rollout and training work {where}: {layout.engines} engines of "
        f"{layout.tensor_parallel} device(s),",
        f"# {layout.ranks} trainer ranks of {layout.trainer_parallel}. [simulate] is the cluster as planned; "
        "set data.train to your prompts.",
    ]
    if problem := unready(settings):
        head.append(f"# {problem}.")
    return "\n".join(head) + "\n\n" + dump_changes(settings)


def _assumption(run: Settings) -> str:
    """How long answers are taken to be: what a plan depends on most."""
    lengths, longest = run.simulate.lengths, run.rollout.max_new_tokens
    if lengths.file is not None:
        return f"answers as long as those in {lengths.file}"
    if lengths.mean is None:
        mean = f"{DEFAULT_MEAN * longest:,.0f} tokens in the mean, for want of better: give --simulate.lengths.mean"
    else:
        mean = f"{lengths.mean:,.0f} tokens in the mean"
    return f"answers of {mean} (lognormal, sigma {lengths.sigma:g})"


def _table(console: Console) -> Table:
    """With lines in a terminal; plain columns elsewhere."""
    return Table(title_justify="left", box=box.ROUNDED if console.is_terminal else None, padding=(0, 1))


def _comparison(planned: Planned, table: Table) -> Table:
    """A column a plan."""
    plans = {"best": planned.best}
    if planned.runner_up is not None:
        plans["runner-up"] = planned.runner_up
    if planned.synchronous is not None:
        plans["synchronous"] = planned.synchronous
    table.title = "plans"
    table.add_column("", no_wrap=True)
    for name in plans:
        table.add_column(name, justify="right", style="bold" if name == "best" else "")
    rows = {name: _column(plan) for name, plan in plans.items()}
    for heading in rows["best"]:
        table.add_row(heading, *(column[heading] for column in rows.values()))
    return table


def _column(plan: Plan) -> dict[str, str]:
    settings, result, layout = plan.settings, plan.result, layout_of(plan.settings)
    hardware, shape = load_hardware(settings.simulate.hardware), model_shape_of(settings)
    engine = engine_memory(settings, hardware, shape, layout)
    trainer = trainer_memory(settings, hardware, shape, layout)
    return {
        "hours": f"{plan.hours:.2f}",
        "seconds a step": f"{result.step_seconds:.1f}",
        "  by arithmetic alone": f"{plan.estimate.step:.1f}",
        "trained tokens/s": f"{result.trained_tokens_per_second:,.0f}",
        "rollout + training GPUs": (
            f"{layout.gpus} in turn" if layout.colocated else f"{layout.rollout_gpus} + {layout.trainer_gpus}"
        ),
        "engines × GPUs": f"{layout.engines} × {layout.tensor_parallel}",
        "trainer ranks × GPUs": f"{layout.ranks} × {layout.trainer_parallel}",
        "max_staleness (η)": str(settings.control.max_staleness),
        "token budget": f"{settings.trainer.token_budget:,}",
        "activations": "recomputed" if settings.trainer.activation_checkpointing else "kept",
        "rollout idle": f"{result.rollout['idle'] + result.rollout['paused']:.0%}",
        "trainer idle": f"{result.trainer['wait']:.0%}",
        "staleness, mean": f"{result.staleness_mean:.2f}",
        "KV cache, tokens": f"{engine.kv_tokens:,}",
        "training memory, GB": f"{trainer.total / 1e9:.0f} of {trainer.available / 1e9:.0f}",
    }


def _staleness(planned: Planned, table: Table) -> Table:
    table.title = "the best plan under other bounds"
    table.add_column("max_staleness (η)", justify="right")
    table.add_column("hours", justify="right")
    for bound, hours in sorted(planned.staleness.items()):
        mark = " *" if bound == planned.best.settings.control.max_staleness else ""
        table.add_row(f"{bound}{mark}", f"{hours:.2f}")
    return table


def _sensitivity(planned: Planned, table: Table) -> Table:
    table.title = "if answers are not as assumed"
    table.add_column("length")
    table.add_column("hours, best", justify="right")
    table.add_column("runner-up", justify="right")
    for row in planned.sensitivity:
        other = "" if row.runner_up is None else f"{row.runner_up:.2f}"
        table.add_row(row.assumption, f"{row.best:.2f}", other)
    return table


def _notes(planned: Planned) -> list[str]:
    best, lines = planned.best, []
    if planned.synchronous is not None:
        lines.append(f"{planned.synchronous.hours / best.hours:.2f} times as fast as the synchronous plan")
    if any(row.runner_up is not None and row.runner_up < row.best for row in planned.sensitivity):
        lines.append("the runner-up is faster under some of these assumptions: measure your answers' lengths")
    if best.result.dropped:
        lost = ", ".join(f"{reason.replace('_', ' ')}: {n}" for reason, n in best.result.dropped.items())
        lines.append(f"note: groups are dropped in the best plan ({lost})")
    if best.result.caveat:
        lines.append(f"note: {best.result.caveat}")
    if problem := unready(best.settings):
        lines.append(f"note: {problem}")
    return lines
