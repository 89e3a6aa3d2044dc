"""The filter of system calls: as a program of the kernel's little machine, and as the kernel takes it."""

from __future__ import annotations

import errno
import struct

import pytest

from fleuve.rewards.sandbox.filter import LOOKED_AT, REFUSED, program, supported
from fleuve.rewards.sandbox.level import describe

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def run(code: bytes, number: int, architecture: int, argument: int = 0, second: int = 0) -> int:
    """What the kernel would decide."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, second, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("=HBBI", code))
    at, value = 0, 0
    for _ in range(len(lines)):
        how, yes, no, constant = lines[at]
        if how == 0x06:
            return int(constant)
        if how == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
            at += 1
            continue
        holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[how]
        at += 1 + (yes if holds else no)
    raise AssertionError("it has no end")


@pytest.mark.parametrize("machine", list(ARCHITECTURE))
def test_what_it_decides(machine: str) -> None:
    code, architecture, column = program(machine), ARCHITECTURE[machine], 0 if machine == "x86_64" else 1
    numbers = {name: given[column] for name, given in (REFUSED | LOOKED_AT).items()}
    assert len(set(numbers.values())) == len(numbers)
    for name in REFUSED:
        assert run(code, numbers[name], architecture) == ERROR | errno.EPERM
    for number in set(range(450)) - set(numbers.values()):
        assert run(code, number, architecture) == ALLOW
    assert run(code, numbers["clone3"], architecture) == ERROR | errno.ENOSYS
    thread, fork = 0x003D0F00, 17
    assert run(code, numbers["clone"], architecture, thread) == run(code, numbers["clone"], architecture, fork) == ALLOW
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert run(code, numbers["clone"], architecture, namespace | fork) == ERROR | errno.EPERM
    for family in range(60):
        expected = ALLOW if family in (1, 2, 10) else ERROR | errno.EAFNOSUPPORT
        assert run(code, numbers["socket"], architecture, family) == expected
    for pid, verdict in ((0, ALLOW), (1, ERROR | errno.EPERM), (2**31, ERROR | errno.EPERM)):
        assert run(code, numbers["prlimit64"], architecture, pid) == verdict
    child_ended, others = 17, (1, 2, 15, 16, 18, 64)
    for action in (1, 2**32, 0x7FFF_0000_0000):
        assert run(code, numbers["rt_sigaction"], architecture, child_ended, action) == ERROR | errno.EPERM
        assert {run(code, numbers["rt_sigaction"], architecture, signal, action) for signal in others} == {ALLOW}
    assert run(code, numbers["rt_sigaction"], architecture, child_ended, 0) == ALLOW
    core_scheduling, name_thread = 62, 15
    assert run(code, numbers["prctl"], architecture, core_scheduling) == ERROR | errno.EPERM
    assert run(code, numbers["prctl"], architecture, name_thread) == ALLOW
    other = next(a for a in ARCHITECTURE.values() if a != architecture)
    assert run(code, 39, other) == KILL


def test_x86_s_other_numbers_are_none() -> None:
    assert run(program("x86_64"), 0x40000000 + 39, ARCHITECTURE["x86_64"]) == KILL


@pytest.mark.skipif(not supported(), reason="no filter on this machine")
def test_it_is_said_to_be_there() -> None:
    assert "system calls are filtered" in describe("limits")
