"""`fleuve fleet`: the rollout workers of a run that is going on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

fleet = typer.Typer(
    name="fleet", help="The rollout workers of a run that is going on.", no_args_is_help=True, add_completion=False
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Its run directory.")]


@fleet.command()
def show(run: Run) -> None:
    """Each worker's health, version, and answers in flight."""
    from fleuve.launch.orders import Order, give_order

    _print(give_order(run, Order("show")))


@fleet.command()
def add(run: Run, worker: Annotated[str | None, typer.Argument(metavar="NAME", help="Its name.")] = None) -> None:
    """Start one more worker. It gets the current weights, then groups."""
    from fleuve.launch.orders import Order, give_order

    _print(give_order(run, Order("add", worker)))


@fleet.command()
def remove(
    run: Run,
    worker: Annotated[str, typer.Argument(metavar="NAME", help="As `fleuve fleet show` names it.")],
    at_once: Annotated[bool, typer.Option(help="Others take its answers up, instead of it ending them first.")] = False,
) -> None:
    """Let a worker leave."""
    from fleuve.launch.orders import Order, give_order

    _print(give_order(run, Order("remove", worker, at_once)))


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line)
