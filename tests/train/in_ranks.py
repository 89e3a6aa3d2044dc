"""Runs functions in several ranks on this machine: forks of one process, so that torch is imported once.

`python in_ranks.py DIRECTORY` plays every scenario of `RankScenarios` and leaves what each rank returned in
DIRECTORY/NAME-COUNT-RANK.pt. A count of 0 is a trainer that is alone, without any group. Scenarios named `long_…` have
two ranks to a context.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_scenarios import COUNTS, SCENARIOS

from fleuve.train.ranks import RankGroup, Ranks, meeting_place

DEADLINE = 120
"""Seconds for one scenario; what hangs is killed."""


def in_ranks(work: Callable[[Ranks], Any], count: int, result: Callable[[int], Path], context: int = 1) -> None:
    """Call `work` in `count` processes that are one group, and keep what it returns."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    children = []
    for rank in range(max(count, 1)):
        child = os.fork()
        if child:
            children.append(child)
            continue
        signal.alarm(DEADLINE)
        status = 1
        try:
            torch.set_num_threads(1)
            if count:
                store = meeting_place(address, rank, 30.0, listening if rank == 0 else None)
                ranks: Ranks = RankGroup(store, rank, count, "cpu", 60.0, context)
            else:
                ranks = Ranks()
            torch.save(work(ranks), result(rank))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    listening.close()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        sys.exit(f"ranks ended with {statuses}")


def main(directory: Path) -> None:
    for name, scenario in SCENARIOS.items():
        for count in COUNTS[name]:
            place = directory / name
            place.mkdir(exist_ok=True)

            def result(rank: int, name: str = name, count: int = count) -> Path:
                return directory / f"{name}-{count}-{rank}.pt"

            context = 2 if name.startswith("long_") else 1
            in_ranks(partial(_play, scenario, place), count, result, context)


def _play(scenario: Callable[[Ranks, Path], Any], place: Path, ranks: Ranks) -> Any:
    return scenario(ranks, place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
