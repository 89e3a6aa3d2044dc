"""Published weights to many rollout workers at once: the file's bytes, broadcast from the trainer's process.

For each version there is a meeting in the sender's store. Who was invited says there that it has come; the sender waits
for all for some seconds, and then says who takes part, so a member that is late or gone costs itself alone. A group is
kept for as long as the same ones come, and all of them hold their end of it; whoever failed has let go of his.

What is sent is the published file as it is, in buckets. It is received into memory that has no name in any directory,
and read from there by `store.read_weights`: size, checksum and version are verified as those of any file, and whoever
swaps it in has all of it. Nothing is unpickled. Who did not get the weights so gets them by the file: there is no
second attempt.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fleuve.types import Invitation, WeightFile
from fleuve.weights.group import BroadcastError, Group, own_address, split_address
from fleuve.weights.invitation import Arrival, Backend, Call, Hall, Loss, Verdict, seats_of
from fleuve.weights.store import WeightError, read_weights
from fleuve.wire.listen import bind

_LOOK = 0.005
"""Seconds between two looks at who has come."""


class Sender:
    """Broadcasts published files. It listens on `host`, on a port of its own.

    Args:
        device: where the sender's end of an NCCL group is; with `cpu` there are none.
        seconds: in which the invited have to come, and then in which a group has to be made and each bucket to go.
        bucket: bytes that are sent at a time.
    """

    def __init__(self, host: str, device: str, seconds: float, bucket: int) -> None:
        sock = bind(host, 0)
        self._host, port = sock.getsockname()[:2]
        address = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        self.hall = Hall(address=address, key=secrets.token_hex(16))
        store = dist.TCPStore(self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
        self._store = dist.PrefixStore(self.hall.key, store)
        self._device = device
        self._seconds = seconds
        self._bucket = bucket
        self._turn = threading.Lock()
        self._lost: set[Loss] = set()
        self._seated: tuple[Backend, list[str]] = "gloo", []
        self._group: Group | None = None
        self._groups = 0
        self._called_off = ""

    def send(self, call: Call) -> list[str]:
        """Broadcast; the members that took part. What became of it there, they know. Blocks; one call at a time.

        Raises:
            BroadcastError: nobody came, or it broke off.
        """
        with self._turn:
            key = str(call.number)
            verdict = Verdict(refused="it was not begun")
            try:
                # gloo ends a process that was to receive less than is sent.
                arrivals = {s: a for s, a in self._await(call).items() if _known(a.weights) == _known(call.weights)}
                present = [m for m, count in call.members.items() if all(s in arrivals for s in seats_of({m: count}))]
                seats = seats_of({member: call.members[member] for member in present})
                if not seats:
                    raise BroadcastError(f"none of {len(call.members)} workers came for it within {self._seconds:g} s")
                verdict = self._judge(seats, arrivals)
                self._say(f"verdict/{key}", verdict)
                self._send(call.weights, verdict, call.number)
                return present
            except BaseException as error:
                if not verdict.seats:
                    self._say(f"verdict/{key}", Verdict(refused=str(error)))
                self._say(f"off/{key}", Verdict(refused=str(error)))
                self._part()
                raise
            finally:
                self._tidy(call)

    def lose(self, loss: Loss) -> None:
        """It is not waited for; a broadcast that it has a part in is called off, since the others would be held up."""
        self._lost.add(loss)

    def close(self) -> None:
        """Call off what is under way; returns at once."""
        self._called_off = "the sender ends"

    def _await(self, call: Call) -> dict[str, Arrival]:
        """Who has come, by seat, once all have or the time is over."""
        deadline = time.monotonic() + self._seconds
        arrivals: dict[str, Arrival] = {}
        while True:
            waited_for = [s for s in seats_of(self._left(call)) if s not in arrivals]
            for seat in waited_for:
                if self._store.check([key := f"here/{call.number}/{seat}"]):
                    arrivals[seat] = msgspec.json.decode(self._store.get(key), type=Arrival)
            if all(seat in arrivals for seat in waited_for) or time.monotonic() > deadline:
                return arrivals
            if self._called_off:
                raise BroadcastError(self._called_off)
            time.sleep(_LOOK)

    def _left(self, call: Call) -> dict[str, int]:
        gone = {loss.member for loss in list(self._lost) if loss.number == call.number}
        return {member: count for member, count in call.members.items() if member not in gone}

    def _judge(self, seats: list[str], arrivals: dict[str, Arrival]) -> Verdict:
        """NCCL wants a GPU for each; and the group that there is goes on only if all of it do."""
        devices = [_identity(self._device), *(arrivals[seat].device for seat in seats)]
        backend: Backend = "nccl" if all(devices) and len(set(devices)) == len(devices) else "gloo"
        kept = self._group is not None and self._seated == (backend, seats)
        if not kept or any(arrivals[seat].group != self._groups for seat in seats):
            self._part()
            self._groups += 1
            self._seated = backend, seats
        return Verdict(group=self._groups, backend=backend, seats=seats, bucket=self._bucket)

    def _send(self, weights: WeightFile, verdict: Verdict, number: int) -> None:
        members = {seat.rpartition(".")[0] for seat in verdict.seats}

        def off() -> str:
            for loss in list(self._lost):
                if loss.number == number and loss.member in members:
                    return f"{loss.member} is lost"
            said = f"off/{number}"
            return self._called_off or (_refused(self._store, said) if self._store.check([said]) else "")

        if self._group is None:
            store = dist.PrefixStore(f"group/{verdict.group}", _again(self._store))
            size = len(verdict.seats) + 1
            self._group = Group(verdict.backend, store, 0, size, self._host, self._device, self._seconds, off)
        content = _mapped(weights.path, weights.bytes, shared=False)
        with _on(self._device if verdict.backend == "nccl" else "cpu") as place:
            for part in content.split(verdict.bucket):
                self._group.broadcast(part if place is None else part.to(place), off)

    def _part(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _say(self, key: str, verdict: Verdict) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(key, msgspec.json.encode(verdict).decode())

    def _tidy(self, call: Call) -> None:
        """Nobody looks any more at what was said of the meeting before; of this one, late ones may."""
        for loss in list(self._lost):
            if loss.number <= call.number:
                self._lost.discard(loss)
        with contextlib.suppress(RuntimeError):
            for seat in seats_of(call.members):
                self._store.delete_key(f"here/{call.number}/{seat}")
            for said in ("verdict", "off"):
                self._store.delete_key(f"{said}/{call.number - 1}")


class Receiver:
    """A rollout worker's end. Its tensors are on `device` while they travel by NCCL; `seat` says which of its worker's
    processes it is. It keeps its end of the last group that it was in."""

    def __init__(self, device: str = "cpu", seat: int = 0) -> None:
        self._device = device
        self._seat = seat
        self._turn = threading.Lock()
        self._hall: Hall | None = None
        self._store: dist.Store | None = None
        self._group: Group | None = None
        self._number = 0

    def read(self, file: WeightFile, invitation: Invitation) -> dict[str, Tensor]:
        """The tensors of `file`, by name, on the CPU: from the broadcast that one is invited to, and not from its path.
        Blocks; one call at a time.

        Raises:
            BroadcastError: they did not come, or what came is not what was published.
        """
        what = f"weights of version {file.version}, by broadcast"
        if not hasattr(os, "memfd_create"):
            raise BroadcastError(f"{what}: this system has no files without names (memfd_create)")
        with self._turn:
            memory = os.memfd_create("fleuve-weights", os.MFD_CLOEXEC)
            path = f"/proc/self/fd/{memory}"
            try:
                os.ftruncate(memory, file.bytes)
                self._receive(path, file, invitation)
            except (RuntimeError, OSError, ValueError) as error:
                os.close(memory)
                raise BroadcastError(f"{what}: {' '.join(str(error).split())}") from error
            try:
                return read_weights(msgspec.structs.replace(file, path=path))
            except WeightError as error:
                raise BroadcastError(str(error).replace(path, "what was broadcast")) from error
            finally:
                os.close(memory)

    def _receive(self, path: str, file: WeightFile, invitation: Invitation) -> None:
        """Have the file in `path`, which has its size."""
        number, seat = invitation.number, f"{invitation.member}.{self._seat}"
        store = self._open(Hall(address=invitation.address, key=invitation.key), invitation.seconds)
        arrival = Arrival(
            weights=file, group=self._number if self._group is not None else 0, device=_identity(self._device)
        )
        try:
            store.set(f"here/{number}/{seat}", msgspec.json.encode(arrival).decode())
            # The sender waits as long for the others, and may have begun to wait later.
            store.wait([f"verdict/{number}"], timedelta(seconds=2 * invitation.seconds))
            verdict = msgspec.json.decode(store.get(f"verdict/{number}"), type=Verdict)
        except RuntimeError:
            self._store = None  # the sender is gone, or unwell
            raise
        if verdict.refused or seat not in verdict.seats:
            raise BroadcastError(verdict.refused or "it began before this worker had come, or is of other weights")
        try:
            self._take(path, file, verdict, verdict.seats.index(seat) + 1, invitation)
        except BaseException as error:
            self._part()
            with contextlib.suppress(RuntimeError):  # the others need not wait for what this one has given up
                refusal = Verdict(refused=f"{invitation.member} gave up: {error}")
                store.set(f"off/{number}", msgspec.json.encode(refusal).decode())
            raise

    def _take(self, path: str, file: WeightFile, verdict: Verdict, rank: int, invitation: Invitation) -> None:
        store = self._store
        assert store is not None
        said = f"off/{invitation.number}"

        def off() -> str:
            return _refused(store, said) if store.check([said]) else ""

        if self._group is None or verdict.group != self._number:
            self._part()
            own, within = own_address(invitation.address), dist.PrefixStore(f"group/{verdict.group}", _again(store))
            size = len(verdict.seats) + 1
            self._group = Group(verdict.backend, within, rank, size, own, self._device, invitation.seconds, off)
            self._number = verdict.group

        content = _mapped(path, file.bytes, shared=True)
        with _on(self._device if verdict.backend == "nccl" else "cpu") as place:
            for part in content.split(verdict.bucket):
                there = part if place is None else torch.empty(len(part), dtype=torch.uint8, device=place)
                self._group.broadcast(there, off)
                if place is not None:
                    part.copy_(there)

    def _open(self, hall: Hall, seconds: float) -> dist.Store:
        if self._store is None or self._hall != hall:
            self._part()
            self._hall, self._store = hall, None
            host, port = split_address(hall.address)
            found = dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=seconds))
            self._store = dist.PrefixStore(hall.key, found)
        return self._store

    def _part(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None


def _known(file: WeightFile) -> tuple[int, int, str]:
    return file.version, file.bytes, file.checksum


def _again(store: dist.Store) -> dist.Store:
    """The same store by a connection of its own: one that waits holds up whatever else would use it."""
    cloned: dist.Store = store.clone()  # type: ignore[attr-defined]
    return cloned


def _refused(store: dist.Store, key: str) -> str:
    return msgspec.json.decode(store.get(key), type=Verdict).refused


def _mapped(path: str, size: int, *, shared: bool) -> Tensor:
    """The file's `size` bytes; `shared`: what is written there is in the file."""
    return torch.from_file(path, shared=shared, size=size, dtype=torch.uint8)


def _identity(device: str) -> str:
    """Which GPU it is, wherever in the cluster; empty for the CPU."""
    if not device.startswith("cuda"):
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextlib.contextmanager
def _on(device: str) -> Iterator[str | None]:
    """What is done inside goes into a stream of its own on this GPU; nothing of the kind, and None, for the CPU."""
    if not device.startswith("cuda"):
        yield None
        return
    torch.cuda.set_device(device)  # of this thread
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield device
