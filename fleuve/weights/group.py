"""A process group for broadcasts alone, beside whatever groups its processes have: nothing of the default group is
touched, which in a trainer is its ranks' and in a vLLM worker vLLM's.

Nothing here waits for longer than it is told to, whatever the others do: an operation is looked after from outside, and
left behind when its time is over. What is left behind ends in a thread of its own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleuve.weights.invitation import Backend
from fleuve.weights.store import WeightError

LOOK = 0.1
"""Seconds between two looks at whether a broadcast is called off."""
_QUICK, _SLOW = 50e-6, 2e-3
"""Seconds between two looks at an operation: soon after it was begun, and later."""
_BY_ITSELF = timedelta(days=7)
"""When NCCL's own watchdog would find an operation late: it is ended from here long before."""


class BroadcastError(WeightError):
    """Weights did not come by broadcast. They may come another way. One line."""


class Group:
    """Rank 0 of the `size` members sends. Making it waits for all of them.

    Args:
        store: where they find each other; used from another thread, so not one that anybody else uses.
        host: the address at which the others reach this one.
        device: where tensors are; `cpu`, or with NCCL one of CUDA.
        seconds: how long making it, or a broadcast, may take.
        off: asked now and then, while one waits, whether the whole is called off, and why; empty if not.

    Raises:
        BroadcastError: they were not all there in time, or it was called off.
    """

    def __init__(
        self,
        backend: Backend,
        store: dist.Store,
        rank: int,
        size: int,
        host: str,
        device: str,
        seconds: float,
        off: Callable[[], str],
    ) -> None:
        self.backend = backend
        self._seconds = seconds

        def make() -> Any:
            if backend == "nccl":
                return _nccl(store, rank, size, device)
            return _gloo(store, rank, size, host, seconds)

        self._made: Any = _within(seconds, make, off)

    def broadcast(self, tensor: Tensor, off: Callable[[], str]) -> None:
        """Rank 0's `tensor` to all.

        Raises:
            BroadcastError: it was called off, or the others are not there in time, or gone.
        """
        now = time.monotonic()
        deadline, look, pause = now + self._seconds, now + LOOK, _QUICK
        try:
            limit = _BY_ITSELF if self.backend == "nccl" else timedelta(seconds=self._seconds)
            work = self._made.broadcast(tensor, 0, limit)
            while not work.is_completed():
                now = time.monotonic()
                if now > deadline:
                    raise BroadcastError(f"nothing went on for {self._seconds:g} s")
                if now > look:
                    if why := off():
                        raise BroadcastError(why)
                    look = now + LOOK
                time.sleep(pause)
                pause = min(pause * 2, _SLOW)
            work.wait()
        except RuntimeError as error:
            raise error if isinstance(error, BroadcastError) else BroadcastError(_line(error)) from error

    def leave(self) -> None:
        """No more of it. Returns at once: an operation under way keeps what it works on until it is late."""
        held, self._made = [self._made], None
        threading.Thread(target=_let_go, args=(held, self.backend), name="leaving", daemon=True).start()


def _gloo(store: dist.Store, rank: int, size: int, host: str, seconds: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=named) if named else gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=seconds)
    return gloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, device: str) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _BY_ITSELF
    # Its watchdog would end this whole process for an operation that fails. The variable is read when a group is made.
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(variable)
    os.environ[variable] = "0"
    try:
        made = nccl(store, rank, size, options)
    finally:
        os.environ.pop(variable) if before is None else os.environ.update({variable: before})
    torch.cuda.set_device(device)  # of this thread
    made.eager_connect_single_device(torch.device(device))
    return made


def _within(seconds: float, make: Callable[[], Any], off: Callable[[], str]) -> Any:
    """What `make` makes, in a thread that is left to itself if that takes longer.

    Raises:
        BroadcastError: it does, or failed, or was called off meanwhile.
    """
    made: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(LOOK)
        if thread.is_alive() and (why := off()):
            raise BroadcastError(why)
    if made:
        return made[0]
    reason = _line(failed[0]) if failed else f"not connected within {seconds:g} s"
    raise BroadcastError(f"its members did not come together: {reason}")


def _let_go(held: list[Any], backend: Backend) -> None:
    """Its end waits for what is under way: gloo's until that is late; NCCL's is ended."""
    try:
        if backend == "nccl":
            held[0].abort()
    finally:
        held.clear()


def _line(error: Exception) -> str:
    """What torch has to say of it, in a line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def own_address(address: str) -> str:
    """This machine's address on the way to `address` (`HOST:PORT`), which need not be there. Nothing is sent.

    Raises:
        OSError: there is no way.
    """
    host, port = split_address(address)
    family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(place)
        return str(way.getsockname()[0])


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT` as its two parts.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
