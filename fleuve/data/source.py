"""An endless, resumable stream of prompts: passes over a data set, each in its own seeded order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fleuve.data.rows import Row
from fleuve.errors import UserError
from fleuve.types import Prompt


class Passes(Protocol):
    """A data set that can be gone over again and again."""

    fingerprint: str
    """Changes with anything that would change what a cursor points at."""

    def rows(self, number: int) -> Sequence[Row]:
        """The rows of pass `number`, always the same for the same number."""

    def order(self, number: int) -> Sequence[int]:
        """The indices of these rows in the order in which they are served."""


class FilePasses:
    """The same rows in every pass, shuffled anew in each."""

    def __init__(self, rows: Sequence[Row], digest: str, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self.fingerprint = f"{digest}/{len(rows)}/{seed if shuffle else 'in order'}"

    def rows(self, number: int) -> Sequence[Row]:
        return self._rows

    def order(self, number: int) -> Sequence[int]:
        indices = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{number}").shuffle(indices)
        return indices


class GeneratedPasses:
    """New rows in every pass: `generate(number)` makes those of one, always the same for the same number."""

    def __init__(self, generate: Callable[[int], Sequence[Row]], fingerprint: str) -> None:
        self._generate = generate
        self._last: tuple[int, Sequence[Row]] = (-1, ())
        self.fingerprint = fingerprint

    def rows(self, number: int) -> Sequence[Row]:
        if self._last[0] != number:
            self._last = (number, self._generate(number))
        return self._last[1]

    def order(self, number: int) -> Sequence[int]:
        return range(len(self.rows(number)))


class RowSource:
    """Implements `contracts.PromptSource`. A prompt's id is `e<pass>/<row>`, unique in the whole run.

    What was given back is served again before new prompts, in the order in which it came back. The cursor counts what
    was served, not what was trained: who saves it also saves which of the served prompts are still in flight, and
    gives them back after `restore` (`prompt(id)` makes them again).
    """

    def __init__(self, passes: Passes, make: Callable[[str, Row], Prompt], verifiers: Sequence[str] = ()) -> None:
        """`verifiers`: those that the rows name."""
        self.verifiers = tuple(verifiers)
        self._passes = passes
        self._make = make
        self._pass = 0
        self._position = 0
        self._order = passes.order(0)
        self._returned: deque[str] = deque()

    def next(self) -> Prompt:
        """The next prompt; never ends."""
        if self._returned:
            return self.prompt(self._returned.popleft())
        if self._position == len(self._order):
            self._go_to(self._pass + 1, 0)
        index = self._order[self._position]
        self._position += 1
        return self.prompt(f"e{self._pass}/{index}")

    def prompt(self, id: str) -> Prompt:
        """The prompt of that id, whether served before or not.

        Raises:
            KeyError: no prompt of this source has such an id.
        """
        number, index = _parse_id(id)
        rows = self._passes.rows(number)
        if index >= len(rows):
            raise KeyError(id)
        return self._make(id, rows[index])

    def give_back(self, prompt: Prompt) -> None:
        """Serve this prompt again.

        Raises:
            ValueError: it has been given back already and not been served since.
        """
        if prompt.id in self._returned:
            raise ValueError(f"prompt {prompt.id} was given back twice")
        self._returned.append(prompt.id)

    def state(self) -> dict[str, object]:
        """The cursor: pass, position in it, and what was given back."""
        return {
            "pass": self._pass,
            "position": self._position,
            "returned": list(self._returned),
            "fingerprint": self._passes.fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a cursor.

        Raises:
            UserError: it is a cursor of other data, or of another seed.
        """
        if state["fingerprint"] != self._passes.fingerprint:
            raise UserError(
                "the saved position belongs to other data: data.train, data.shuffle or seed changed since "
                f"({state['fingerprint']}, now {self._passes.fingerprint})"
            )
        self._go_to(int(state["pass"]), int(state["position"]))
        self._returned = deque(state["returned"])

    def _go_to(self, number: int, position: int) -> None:
        self._pass, self._position = number, position
        self._order = self._passes.order(number)


def _parse_id(id: str) -> tuple[int, int]:
    number, _, index = id.removeprefix("e").partition("/")
    if not (id.startswith("e") and number.isdecimal() and index.isdecimal()):
        raise KeyError(id)
    return int(number), int(index)
