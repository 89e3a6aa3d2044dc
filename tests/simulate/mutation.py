"""Breaking one thing in the production code on purpose, to see whether the schedule fuzzer finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fleuve.control.gate import Gate
from fleuve.simulate.fuzz import play, play_all

WITHIN = 2000
"""Seeds within which a mutant is found; most of them take a handful."""

Mutant = Callable[[pytest.MonkeyPatch], None]
Mutants = list[tuple[Mutant, str, int]]


def into(mutants: Mutants) -> Callable[..., Callable[[Mutant], Mutant]]:
    """A decorator of mutants; the fuzzer's complaint has one of the words (`|` between them) in it. What shows in few
    schedules is looked for from the seed `first` on, where one of them was seen to be near."""

    def mutant(found_by: str, first: int = 0) -> Callable[[Mutant], Mutant]:
        def add(function: Mutant) -> Mutant:
            mutants.append((function, found_by, first))
            return function

        return add

    return mutant


def patch(monkeypatch, cls, name, wrapper):
    """Replace a method by `wrapper(original, self, …)`."""
    original = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, *args, **more: wrapper(original, self, *args, **more))


def names(mutants: Mutants) -> list[str]:
    """Of the tests."""
    return [mutant.__name__ for mutant, *_ in mutants]


def check_found(break_it: Mutant, found_by: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer finds it, for what it is, and finds it again."""
    break_it(monkeypatch)
    found = next((o for o in play_all(range(first, first + WITHIN)) if o.violation), None)
    assert found is not None, f"not found within {WITHIN} seeds from {first} on"
    assert any(word in found.violation for word in found_by.split("|")), found.explain()
    assert play(found.case.seed).digest == found.digest


def one_slot_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simplest mutant."""

    def init(original, self, *args):
        original(self, *args)
        self.slots += 1

    patch(monkeypatch, Gate, "__init__", init)
