"""What a simulated run ended with, in one exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fleuve.contracts import RolloutError, RunError, TrainerError
from fleuve.errors import UserError

EXPECTED = (RunError, RolloutError, TrainerError)
"""What can end a run without a fault in Fleuve: settings that do not go together, such as too short a deadline."""


@contextmanager
def in_one() -> Iterator[None]:
    """Of groups of what is to be expected, all of one cause, the first is raised. Faults pass as they are.

    Raises:
        UserError: the settings cannot be.
        RunError: a run of these settings would fail; says why.
    """
    try:
        yield
    except Exception as error:
        leaves = _leaves(error)
        if not all(isinstance(leaf, (*EXPECTED, UserError)) for leaf in leaves):
            raise
        mistakes = [leaf for leaf in leaves if isinstance(leaf, UserError)]
        if mistakes:
            raise mistakes[0] from None
        raise RunError(str(leaves[0])) from None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
