"""What is said around a broadcast of weights: by the controller to the sender, and by those who meet, to each other.

Imports no torch: the controller's process has none.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fleuve.types import WeightFile

Backend = Literal["gloo", "nccl"]


class Hall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a sender's meetings are: `HOST:PORT` of its store, and the prefix of all that is written in there."""

    address: str
    key: str


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sender is asked to do: broadcast `weights` in its meeting `number`, to `members`, each of whom comes in as
    many processes as it says."""

    number: int
    weights: WeightFile
    members: dict[str, int]


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A member of the meeting `number` does not come, or does not go on."""

    number: int
    member: str


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process has come for `weights`. It holds its end of a `group` from an earlier meeting (0: of none), and its
    tensors are on the GPU of this identity (`device`; empty: on the CPU)."""

    weights: WeightFile
    group: int
    device: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a meeting goes on: `seats[i]` is rank i + 1 of `group`, the sender is rank 0, and a file is sent in
    buckets of so many bytes. Whoever has no seat came too late, or for others. With `refused` there is no broadcast."""

    group: int = 0
    backend: Backend = "gloo"
    seats: list[str] = []
    bucket: int = 0
    refused: str = ""


def seats_of(members: dict[str, int]) -> list[str]:
    """The processes of these members, as they call themselves.

    Example: `{"a": 1, "b": 2}` are `["a.0", "b.0", "b.1"]`.
    """
    return [f"{member}.{index}" for member, count in members.items() for index in range(count)]
