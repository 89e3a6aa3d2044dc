"""The production data source, watched by the world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleuve.data.rows import Row
from fleuve.data.source import FilePasses, RowSource
from fleuve.simulate.faults import Case
from fleuve.types import Prompt

if TYPE_CHECKING:
    from fleuve.simulate.leg import Leg

ROWS = 7
"""Rows of the data set: several passes over it in most runs."""


class Source(RowSource):
    """The production source, watched once there is a world."""

    def __init__(self, case: Case) -> None:
        rows = [Row(str(line), {}) for line in range(ROWS)]
        super().__init__(FilePasses(rows, "fuzz", case.seed, shuffle=True), _prompt)
        self.world: Leg | None = None

    def next(self) -> Prompt:
        prompt, world = super().next(), self.world
        if world is not None:
            served = min(world.sampled(), default=world.fleet.newest_version)
            world.ledger.issues(prompt, world.controller.gate, served)
        return prompt

    def give_back(self, prompt: Prompt) -> None:
        super().give_back(prompt)
        if self.world is not None:
            self.world.ledger.gives_back(prompt)

    def served(self) -> set[str]:
        """Every prompt that was served at least once, in this life or an earlier one, and is not to be served again."""
        state = self.state()
        number, position = int(str(state["pass"])), int(str(state["position"]))
        whole = {f"e{p}/{line}" for p in range(number) for line in range(ROWS)}
        begun = {f"e{number}/{index}" for index in self._passes.order(number)[:position]}
        return (whole | begun) - set(self._returned)


def _prompt(id: str, row: Row) -> Prompt:
    return Prompt(id=id, input_ids=[1, 2], text="", answer="")
