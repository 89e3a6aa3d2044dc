"""What the ranks of one trainer tell each other, besides gradients and weights.

`Ranks` is a trainer that is alone: what all know is what it knows. `RankGroup` is one of several processes; each of its
calls is made by all ranks, in the same order, and every one ends by the group's deadline. What it returns is the same
on all of them to the last bit, so that all take the same decisions.

Ranks of one context (`train.context`), and those that compute layers together (`train.tensor`), compute the same
micro-batches and come to the same; what is added up over micro-batches counts one of them. Of eight ranks with two to a
context and two to a tensor, 0 and 1 compute layers together, so do 2 and 3, and 0 to 3 the same micro-batches.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fleuve.config.settings import TrainerSettings
from fleuve.modeling.loading import pick_device


class Ranks:
    """A trainer of one process."""

    rank = 0
    count = 1
    context = 1
    """Of how many parts of tokens, with a rank or a group for each, a micro-batch is made."""
    tensor = 1
    """How many ranks compute each layer together."""

    @property
    def seats(self) -> int:
        """How many micro-batches are computed at a time."""
        return self.count // (self.context * self.tensor)

    @property
    def seat(self) -> int:
        """Which of them this rank has a part in."""
        return self.rank // (self.context * self.tensor)

    @property
    def counts(self) -> bool:
        """Whether what this rank comes to stands for all that have a part in its micro-batches."""
        return self.rank % (self.context * self.tensor) == 0

    @property
    def leads(self) -> bool:
        """Whether this is the rank that answers and writes what only one has to."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Of each value the sum over all micro-batches, in double precision."""
        return list(values)

    def total(self, value: float) -> float:
        """The sum over all ranks."""
        return value

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest of all ranks."""
        return list(values)

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return flag

    def fill_in(self, parts: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """`parts` fp32 on the CPU, of which each seat knows some (those of the right size), no two the same: all."""
        return parts

    def joined(self, part: Tensor) -> Tensor:
        """One-dimensional fp32 tensors of any lengths, seat after seat, on the device that `part` is on."""
        return part

    def first_word(self, word: str) -> str:
        """What the first rank that has something to say says; empty if none has."""
        return word


class RankGroup(Ranks):
    """One of several ranks, over gloo where tensors are on the CPU.

    Args:
        store: where the ranks find each other.
        device: `cpu`, or `cuda`, where weights and gradients travel by NCCL.
        timeout: seconds that ranks wait for each other at most.
        secret: known to the ranks alone. Whoever can reach the store could write into it what rank 0 does.
        context: in how many parts of tokens a micro-batch is computed.
        tensor: how many neighbours compute layers together; `context * tensor` divides `count`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        count: int,
        device: str,
        timeout: float,
        context: int = 1,
        secret: str = "",
        tensor: int = 1,
    ) -> None:
        self.rank = rank
        self.count = count
        self.context = context
        self.tensor = tensor
        self.secret = secret
        self.store = store
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout),
        )
        together = context * tensor
        starts = [first + column for first in range(0, count, together) for column in range(tensor)]
        self.neighbours = self._own([range(s, s + together, tensor) for s in starts], timeout) if context > 1 else None
        """The ranks with the other tokens of this one's micro-batches, where there are any."""
        self.tensors: dist.ProcessGroup | None = None
        """The ranks that this one computes layers with, where there are any."""
        self.shards: dist.ProcessGroup | None = None
        """The ranks that have the same parts of layers as this one, where not all have."""
        if tensor > 1:
            self.tensors = self._own([range(s, s + tensor) for s in range(0, count, tensor)], timeout)
            self.shards = self._own([range(column, count, tensor) for column in range(tensor)], timeout)

    def sum(self, values: Sequence[float]) -> list[float]:
        # Added up here, in the order of ranks: an all-reduce does not promise the same bits everywhere.
        known = values if self.counts else [0.0] * len(values)
        return torch.stack(self._all(torch.tensor(known, dtype=torch.float64))).sum(0).tolist()

    def total(self, value: float) -> float:
        return float(torch.cat(self._all(torch.tensor([value], dtype=torch.float64))).sum())

    def maximum(self, values: Sequence[float]) -> list[float]:
        return torch.stack(self._all(torch.tensor(values, dtype=torch.float64))).amax(0).tolist()

    def any(self, flag: bool) -> bool:
        return any(bool(x) for x in self._all(torch.tensor([flag])))

    def fill_in(self, parts: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        known = [p if len(p) == n and self.counts else torch.zeros(n) for p, n in zip(parts, sizes, strict=True)]
        whole = torch.cat([*known, torch.zeros(0)])
        dist.all_reduce(whole)  # each number and zeros: exact in any order
        return list(whole.split(list(sizes)))

    def joined(self, part: Tensor) -> Tensor:
        part = part if self.counts else part[:0]
        lengths = [int(x) for x in self._all(torch.tensor([len(part)]))]
        padded = torch.zeros(max(lengths))
        padded[: len(part)] = part.detach().float().cpu()
        return torch.cat([p[:n] for p, n in zip(self._all(padded), lengths, strict=True)]).to(part.device)

    def first_word(self, word: str) -> str:
        said = torch.frombuffer(bytearray(b"\0" + word.encode()), dtype=torch.uint8)
        lengths = [int(x) for x in self._all(torch.tensor([len(said)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(said)] = said
        words = [bytes(w[1:n].tolist()).decode() for w, n in zip(self._all(padded), lengths, strict=True)]
        return next(filter(None, words), "")

    def broadcast(self, content: bytes, size: int) -> bytes:
        """Rank 0's `content`, `size` bytes of it, to all."""
        buffer = bytearray(content) if self.leads else bytearray(size)
        if size:
            dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0)
        return bytes(buffer)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _own(self, groups: Sequence[range], timeout: float) -> dist.ProcessGroup:
        """The group of this rank. All ranks make all groups, in the same order."""
        made: list[dist.ProcessGroup] = [
            dist.new_group(list(group), timeout=timedelta(seconds=timeout)) for group in groups
        ]
        return next(m for m, group in zip(made, groups, strict=True) if self.rank in group)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(gathered, tensor)
        return gathered


def meeting_place(address: str, rank: int, timeout: float, listening: socket.socket | None = None) -> dist.Store:
    """The store in which ranks find each other: rank 0 keeps it, at `address` (`HOST:PORT`); the others wait up to
    `timeout` seconds for it to be there. Where the launcher has bound the port for rank 0 already, nobody can take it
    in between."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host == "127.0.0.1" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine need not be reached from others
    return dist.TCPStore(
        host,
        int(port),
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a trainer meet (`HOST:PORT`), and what they know each other by."""

    address: str
    secret: str


def join_ranks(
    trainer: TrainerSettings, rank: int, meeting: Meeting, listening: socket.socket | None = None
) -> RankGroup:
    """Meet the other ranks. On GPUs each takes one of those that its process sees."""
    device = pick_device(trainer.device)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = meeting_place(meeting.address, rank, trainer.start_timeout, listening)
    context, tensor = trainer.context_parallel, trainer.tensor_parallel
    return RankGroup(store, rank, trainer.ranks, device, trainer.rank_timeout, context, meeting.secret, tensor)
