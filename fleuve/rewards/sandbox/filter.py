"""A filter of system calls (seccomp): what no program under test needs, the kernel refuses before it looks at it.

Kernel bugs are most often met in what is refused here: namespaces, mounts, eBPF, io_uring, keys, tracing. Sockets are
those of the Unix and internet families alone: the network namespace stops the latter, but not, say, vsock, which would
reach from a virtual machine to its host.

And what would spoil the account of a program's time: it may give neither itself nor others another priority, policy or
core (waiting for a core is not held against it, so it must not bring that about), nor hide its children's CPU time (of
a child that nobody waits for, because SIGCHLD is ignored, the kernel forgets it). Another process's limits are out of
its reach: as the same user it could lower those of its sandbox's first process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from fleuve.rewards.sandbox import syscalls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
# Name: its number on x86-64, and on the architectures whose numbers are the generic ones.
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
LOOKED_AT = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "rt_sigaction": (13, 134),
    "socket": (41, 198),
}
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_NAMESPACES = 0x7E020080  # every CLONE_NEW... flag; for `clone` the lowest byte is a signal, so not CLONE_NEWTIME

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_X32 = 0x40000000
_PR_SCHED_CORE, _SIGCHLD = 62, 17


def supported() -> bool:
    """Whether this machine can have it."""
    return platform.machine() in _ARCHITECTURES and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def install() -> None:
    """For this process and all that it forks, for good; does nothing on a machine that cannot have it. The process must
    have given up its privileges.

    Raises:
        OSError: the kernel does not take it.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return
    code = program(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    try:
        syscalls.control(_PR_SET_SECCOMP, _MODE_FILTER, header)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel built without
            raise


def program(machine: str) -> bytes:
    """The filter as classic BPF: 8 bytes an instruction."""
    column = 0 if machine == "x86_64" else 1
    code = _Code()
    code.load(_ARCHITECTURE)
    code.jump(_EQUAL, _ARCHITECTURES[machine], no="kill")  # another architecture's calls have other numbers
    code.load(_NUMBER)
    if machine == "x86_64":
        code.jump(_AT_LEAST, _X32, yes="kill")
    for name, numbers in LOOKED_AT.items():
        code.jump(_EQUAL, numbers[column], yes=name)
    for numbers in REFUSED.values():
        code.jump(_EQUAL, numbers[column], yes="refuse")
    code.end("allow", _ALLOW)
    code.label("clone")
    code.load_argument(0)
    code.jump(_ANY_BIT, _NAMESPACES & ~0xFF, yes="refuse", no="allow_clone")
    code.end("allow_clone", _ALLOW)
    code.label("prctl")
    code.load_argument(0)
    code.jump(_EQUAL, _PR_SCHED_CORE, yes="refuse", no="allow_prctl")
    code.end("allow_prctl", _ALLOW)
    code.label("prlimit64")
    code.load_argument(0)
    code.jump(_EQUAL, 0, yes="allow_prlimit", no="refuse")  # 0: the caller
    code.end("allow_prlimit", _ALLOW)
    code.label("rt_sigaction")
    code.load_argument(0)
    code.jump(_EQUAL, _SIGCHLD, no="allow_action")
    for half in (0, 4):
        code.load_argument(1, half)
        code.jump(_EQUAL, 0, no="refuse")  # a null pointer: it only asks
    code.end("allow_action", _ALLOW)
    code.label("socket")
    code.load_argument(0)
    for family in _FAMILIES:
        code.jump(_EQUAL, family, yes="allow_socket")
    code.end("no_family", _ERROR | errno.EAFNOSUPPORT)
    code.end("allow_socket", _ALLOW)
    code.end("clone3", _ERROR | errno.ENOSYS)  # its flags lie in memory; who calls it then tries `clone`
    code.end("refuse", _ERROR | errno.EPERM)
    code.end("kill", _KILL)
    return code.assembled()


class _Code:
    """Instructions, with jumps to labels that come later."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, str, str]] = []
        self._labels: dict[str, int] = {}

    def load(self, offset: int) -> None:
        self._lines.append((_LOAD, offset, "", ""))

    def load_argument(self, number: int, half: int = 0) -> None:
        """Its lower four bytes (of these machines' 8, little end first), or with `half` = 4 the upper."""
        self.load(_ARGUMENTS + 8 * number + half)

    def jump(self, how: int, value: int, yes: str = "", no: str = "") -> None:
        self._lines.append((how, value, yes, no))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._lines)

    def end(self, name: str, value: int) -> None:
        self.label(name)
        self._lines.append((_RETURN, value, "", ""))

    def assembled(self) -> bytes:
        def distance(at: int, label: str) -> int:
            return self._labels[label] - at - 1 if label else 0

        return b"".join(
            struct.pack("=HBBI", how, distance(at, yes), distance(at, no), value)
            for at, (how, value, yes, no) in enumerate(self._lines)
        )
