"""The Linux system calls that Python 3.11 has no function for. Each raises OSError."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import struct

NEW_USER, NEW_PID, NEW_MOUNTS, NEW_NET, NEW_IPC, NEW_UTS = (
    0x10000000,
    0x20000000,
    0x00020000,
    0x40000000,
    0x08000000,
    0x04000000,
)
NO_SUID, NO_DEVICES, NO_EXEC = 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_READ_ONLY = 1

_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91},
    "riscv64": {"clone": 220, "pivot_root": 41, "capset": 91},
}
_MOUNT_SETATTR = 442  # the same number everywhere
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS = 1, 4, 24, 28
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63


@functools.cache
def _libc() -> ctypes.PyDLL:
    # PyDLL keeps the interpreter's lock: after `clone` the child goes on in Python at once.
    return ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _number(name: str) -> int:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(f"{name}: its number on {platform.machine()} is not known")
    return numbers[name]


def unshare(flags: int) -> None:
    """New namespaces for this process."""
    _check(_libc().unshare(flags), "unshare")


def clone(flags: int) -> int:
    """`fork` into new namespaces; 0 in the child. For a process of one thread: no at-fork handler runs, so the child
    should soon call `os.fork` itself for what is to live longer."""
    return _check(_libc().syscall(_number("clone"), flags | signal.SIGCHLD, 0, 0, 0, 0), "clone")


def mount_tmpfs(target: str, options: str, flags: int = NO_SUID | NO_DEVICES) -> None:
    _check(_libc().mount(b"tmpfs", target.encode(), b"tmpfs", flags, options.encode()), f"mount tmpfs on {target}")


def bind(source: str, target: str) -> None:
    """Show `source`, with all that is mounted below it, at `target` as well."""
    result = _libc().mount(os.fsencode(source), os.fsencode(target), None, _BIND | _RECURSIVE, None)
    _check(result, f"bind {source}")


def make_private() -> None:
    """Mounts made here are not seen elsewhere, nor those made elsewhere here."""
    _check(_libc().mount(None, b"/", None, _PRIVATE | _RECURSIVE, None), "make mounts private")


def make_read_only(target: str, recursive: bool = True, devices: bool = False) -> None:
    """Linux 5.12 or later."""
    wanted = _ATTR_READ_ONLY | NO_SUID | (0 if devices else NO_DEVICES)
    attributes = struct.pack("=4Q", wanted, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc().syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, attributes, len(attributes))
    _check(result, f"make {target} read-only")


def pivot_root(new_root: str, old_root: str) -> None:
    _check(_libc().syscall(_number("pivot_root"), new_root.encode(), old_root.encode()), "pivot_root")


def unmount(target: str) -> None:
    """At once, whoever still uses it."""
    _check(_libc().umount2(os.fsencode(target), _DETACH), f"unmount {target}")


def die_with_parent() -> None:
    """SIGKILL when the parent dies. A change of credentials undoes it: call this last."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Descendants whose parent has died become this process's children."""
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def control(option: int, value: int, data: bytes) -> None:
    """`prctl` with a structure."""
    _check(_libc().prctl(option, value, data, 0, 0), "prctl")


def give_up_privileges() -> None:
    """No capability now, none by any exec, and no more of them within a user namespace."""
    libc = _libc()
    libc.prctl(_PR_SET_SECUREBITS, 0x2F, 0, 0, 0)  # being root means nothing, locked; refused where it already is
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(libc.syscall(_number("capset"), header, bytes(24)), "capset")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
