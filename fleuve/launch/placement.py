"""Which process gets which cores. Pure: cores and settings in, sets of cores and numbers of threads out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Place:
    """Where one process runs. `cpus` None: it floats over all cores."""

    cpus: frozenset[int] | None
    threads: int


@dataclass(frozen=True)
class Placement:
    """One place for the trainer (its first rank), one for each rollout worker, one for each of the trainer's other
    ranks."""

    trainer: Place
    workers: tuple[Place, ...]
    others: tuple[Place, ...] = ()

    @property
    def ranks(self) -> tuple[Place, ...]:
        """The trainer's, rank by rank."""
        return (self.trainer, *self.others)


def available_cpus() -> list[int]:
    """The cores this process may run on (a container may allow fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def place(
    placement: Literal["disaggregated", "colocated"],
    cpus: Sequence[int],
    workers: int,
    worker_threads: int = 0,
    trainer_threads: int = 0,
    ranks: int = 1,
) -> Placement:
    """Share `cpus` out between one trainer of `ranks` processes and `workers` rollout workers.

    `disaggregated`: disjoint sets, since all compute at the same time. Each gets an equal share unless its number of
    threads is given (0: as many as it has cores); what does not divide evenly goes to the trainer, then to the first
    workers. Each rank counts as a process. 2 cores, 1 worker: one core each. With fewer cores than processes nobody is
    bound and each has one thread.

    `colocated`: trainer and workers compute in turn, so the trainer's ranks share every core among themselves, and so
    do the workers.
    """
    cores = sorted(cpus)
    if placement == "colocated":
        first, *others = _share(cores, [trainer_threads] * ranks)
        return Placement(first, _share(cores, [worker_threads] * workers), tuple(others))
    first, *rest = _share(cores, [trainer_threads] * ranks + [worker_threads] * workers)
    return Placement(first, tuple(rest[ranks - 1 :]), tuple(rest[: ranks - 1]))


def place_anywhere(workers: int, worker_threads: int = 0, trainer_threads: int = 0, ranks: int = 1) -> Placement:
    """Places on machines whose cores are not known here: nobody is bound, and each has one thread unless told."""
    worker, rank = (Place(cpus=None, threads=threads or 1) for threads in (worker_threads, trainer_threads))
    return Placement(rank, (worker,) * workers, (rank,) * (ranks - 1))


def _share(cores: list[int], threads: list[int]) -> tuple[Place, ...]:
    """Disjoint runs of `cores`, one an entry of `threads`; floating if there are fewer cores than entries."""
    if len(cores) < len(threads):
        return tuple(Place(cpus=None, threads=count or 1) for count in threads)
    places = []
    start = 0
    for size, count in zip(_sizes(len(cores), threads), threads, strict=True):
        places.append(_bound(cores[start : start + size], count))
        start += size
    return tuple(places)


def _sizes(cores: int, threads: list[int]) -> list[int]:
    """How many cores each gets: as many as its threads, 0 meaning an equal part of the rest.

    Where that is more than there are, equal parts for all.
    """
    if sum(max(count, 1) for count in threads) > cores:
        threads = [0] * len(threads)
    sizes = []
    rest, sharing = cores - sum(threads), threads.count(0)
    for count in threads:
        size = count
        if not count:
            size = -(-rest // sharing)  # rounded up: the first ones get what does not divide
            rest, sharing = rest - size, sharing - 1
        sizes.append(size)
    return sizes


def _bound(cores: list[int], threads: int) -> Place:
    return Place(cpus=frozenset(cores), threads=threads or len(cores))
