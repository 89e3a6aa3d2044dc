"""`python receiver.py`: a process that takes broadcasts. Each line of its input is a JSON `Task`; each line that it
writes says what came of one, the first that it is there."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import msgspec
import torch

from fleuve.types import Invitation, WeightFile
from fleuve.weights.broadcast import Receiver
from fleuve.weights.group import BroadcastError, Group


class Task(msgspec.Struct, kw_only=True):
    """`ends`: at which bucket the process gets which signal."""

    weights: WeightFile
    invitation: Invitation
    ends: tuple[int, int] | None = None


class Outcome(msgspec.Struct, kw_only=True):
    """`digest` of what came, by `digest_of`; or the error."""

    digest: str = ""
    error: str = ""


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, types, shapes and every byte."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def end_at(bucket: int, number: int) -> None:
    """Have this process get the signal when it is to receive that bucket."""
    broadcast, count = Group.broadcast, 0

    def counted(self: Group, *args: object) -> None:
        nonlocal count
        if count == bucket:
            os.kill(os.getpid(), number)
        count += 1
        broadcast(self, *args)  # type: ignore[arg-type]

    Group.broadcast = counted  # type: ignore[method-assign]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    receiver = Receiver()
    print("{}", flush=True)
    for line in sys.stdin:
        task = msgspec.json.decode(line, type=Task)
        if task.ends is not None:
            end_at(*task.ends)
        try:
            outcome = Outcome(digest=digest_of(receiver.read(task.weights, task.invitation)))
        except BroadcastError as error:
            outcome = Outcome(error=str(error))
        print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
