"""Rank 0 has every rank do what it is asked to do; the other ranks follow.

A command is announced in the ranks' store, signed with their secret, and a batch follows by broadcast. When a rank is
done with it, or failed, it says so there. Ranks that fail all alike, before anything was changed, are in step: that is
an error like any other. If one fails alone, the others wait for it somewhere else: they end, and all are started again.
"""

from __future__ import annotations

import hmac
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from fleuve.ending import leave
from fleuve.errors import UserError
from fleuve.train.ranks import RankGroup
from fleuve.train.trainer import Trainer
from fleuve.types import Batch, StepResult, WeightFile, decode, encode

T = TypeVar("T")

ALIKE = 10.0
"""Seconds that a rank which failed waits for the others to have failed, too."""

SAID = (UserError, ValueError, OSError)
"""What ranks can fail with all alike: they looked at the same batch or the same files. All else, lost connections
and memory that ran out among it, is one rank's own."""

_QUICK, _SLOW = 0.001, 0.05
"""Seconds between two looks for the next command: soon after the last one, and later."""


class Command(msgspec.Struct, frozen=True):
    """What all ranks do next: `step` (with a batch of so many bytes), `publish`, `save` or `load` (with a path)."""

    what: str
    path: str = ""
    size: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What came of a command on one rank: nothing to be said of it, or what it failed with."""

    kind: str = ""
    error: str = ""


class Leader:
    """`Trainer`'s methods, for all ranks together. Runs in one thread; `interrupted` is set from others."""

    def __init__(self, trainer: Trainer, group: RankGroup) -> None:
        self.interrupted: threading.Event = trainer.interrupted
        self._trainer = trainer
        self._group = group
        self._number = 0

    @property
    def version(self) -> int:
        """As `Trainer.version`."""
        return self._trainer.version

    def step(self, batch: Batch) -> StepResult:
        """As `Trainer.step`."""
        return self._all("step", lambda: self._trainer.step(batch), content=encode(batch))

    def publish(self, served: int | None = None) -> WeightFile | None:
        """As `Trainer.publish`."""
        return self._all("publish", lambda: self._trainer.publish(served))

    def save(self, path: Path) -> None:
        """As `Trainer.save`."""
        self._all("save", lambda: self._trainer.save(path), path=str(path))

    def load(self, path: Path) -> None:
        """As `Trainer.load`."""
        self._all("load", lambda: self._trainer.load(path), path=str(path))

    def _all(self, what: str, work: Callable[[], T], path: str = "", content: bytes = b"") -> T:
        self._number += 1
        command = _text(Command(what, path, len(content)))
        self._group.store.set(f"command/{self._number}", f"{_signature(self._group, self._number, command)} {command}")
        result, error = None, None
        try:
            self._group.broadcast(content, len(content))
            result = work()
        except Exception as raised:
            error = raised
        if error is not None and not isinstance(error, SAID):
            _out_of_step(what, error, None)
        others = [self._outcome_of(rank, error is None) for rank in range(1, self._group.count)]
        failed = [o for o in others if o is None or o.kind]
        # Writing, which changes nothing, may fail on this rank alone: all others have come to the end of it.
        alone = error is not None and not failed and what in ("publish", "save")
        alike = error is not None and all(o is not None and o.kind == type(error).__name__ for o in others)
        if failed if error is None else not (alone or alike):
            _out_of_step(what, error, next((o for o in failed if o is not None), None))
        self._group.store.set(f"verdict/{self._number}", "go on")
        self._group.store.delete_key(f"command/{self._number - 1}")
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _outcome_of(self, rank: int, patient: bool) -> Outcome | None:
        """What a rank made of the present command; None if it does not say. This rank being done, the others are as
        good as done: what they may still do is write."""
        key = f"outcome/{self._number}/{rank}"
        deadline = time.monotonic() + (self._trainer.settings.trainer.rank_timeout if patient else ALIKE)
        while not self._group.store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_QUICK)
        outcome = msgspec.json.decode(self._group.store.get(key), type=Outcome)
        self._group.store.delete_key(key)
        return outcome


def follow(trainer: Trainer, group: RankGroup, busy: Callable[[str], None]) -> NoReturn:
    """Do what rank 0 says, for as long as it is there; never returns. `busy` is told what it is.

    Raises:
        Exception: whatever this rank alone failed with, or the loss of rank 0.
    """
    number = 0
    while True:
        number += 1
        command = _next_command(group, number)
        busy(command.what)
        error: Exception | None = None
        try:
            _carry_out(trainer, group, command)
        except Exception as raised:
            traceback.print_exc()
            error = raised
        outcome = Outcome() if error is None else Outcome(type(error).__name__, str(error))
        group.store.set(f"outcome/{number}/{group.rank}", _text(outcome))
        if error is not None and not _appears(group, f"verdict/{number}", ALIKE):
            raise error
        busy("")


def _carry_out(trainer: Trainer, group: RankGroup, command: Command) -> None:
    match command.what:
        case "step":
            trainer.step(decode(group.broadcast(b"", command.size), Batch))
        case "publish":
            trainer.publish()
        case "save":
            trainer.save(Path(command.path))
        case "load":
            trainer.load(Path(command.path))
        case _:
            raise ValueError(f"rank 0 asks for {command.what}")


def _next_command(group: RankGroup, number: int) -> Command:
    """Waits for as long as there is none, and rank 0 is there."""
    key, began = f"command/{number}", time.monotonic()
    while not group.store.check([key]):
        time.sleep(min(_SLOW, max(_QUICK, (time.monotonic() - began) / 100)))
    signature, _, command = bytes(group.store.get(key)).decode().partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(group, number, command).encode()):
        raise RuntimeError(f"command {number} is not rank 0's")
    return msgspec.json.decode(command, type=Command)


def _signature(group: RankGroup, number: int, command: str) -> str:
    return hmac.digest(group.secret.encode(), f"{number} {command}".encode(), "sha256").hex()


def _appears(group: RankGroup, key: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not group.store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_QUICK)
    return True


def _out_of_step(what: str, error: Exception | None, other: Outcome | None) -> NoReturn:
    """Ranks that do not know where the others are cannot go on."""
    if error is not None:
        traceback.print_exception(error)
    said = f"; another says {other.kind}: {other.error}" if other is not None else ""
    print(f"the ranks are out of step after {what}{said}", flush=True)
    leave(1)


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
