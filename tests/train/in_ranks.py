"""Runs functions in several ranks on this machine: forks of one process, so that torch is imported once.

`python in_ranks.py DIRECTORY SET` plays the scenarios of one of `rank_scenarios.SETS` and leaves what each rank
returned in DIRECTORY/NAME-MESH-RANK.pt. The mesh 0 is a trainer that is alone, without any group; N is N ranks; NxCxT
is N ranks of which C share a micro-batch's tokens and T its layers.
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
from rank_scenarios import SCENARIOS, SETS

from fleuve.train.ranks import RankGroup, Ranks, meeting_place

DEADLINE = 240
"""Seconds for one scenario; what hangs is killed."""


def in_ranks(work: Callable[[Ranks], Any], mesh: str, result: Callable[[int], Path]) -> None:
    """Call `work` in the processes of `mesh`, which are one group, and keep what it returns."""
    count, context, tensor = (*map(int, mesh.split("x")), 1, 1)[:3]
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
                ranks: Ranks = RankGroup(store, rank, count, "cpu", 60.0, context, tensor=tensor)
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


def main(directory: Path, scenarios: dict[str, tuple[str, ...]]) -> None:
    for name, meshes in scenarios.items():
        for mesh in meshes:
            place = directory / name
            place.mkdir(exist_ok=True)

            def result(rank: int, name: str = name, mesh: str = mesh) -> Path:
                return directory / f"{name}-{mesh}-{rank}.pt"

            in_ranks(partial(_play, SCENARIOS[name], place), mesh, result)


def _play(scenario: Callable[[Ranks, Path], Any], place: Path, ranks: Ranks) -> Any:
    return scenario(ranks, place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), SETS[sys.argv[2]])
