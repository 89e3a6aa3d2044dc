"""Updates that are skipped for a NaN: the run goes on and the ledger balances, or it ends when there are too many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from world import World

from fleuve.contracts import RunError
from fleuve.control.gate import State
from fleuve.simulate.clock import run_virtual
from fleuve.types import Batch, StepResult


def run(in_a_row: Sequence[int]) -> tuple[World, BaseException | None]:
    """A world whose trainer reports these numbers, step by step, and then 0."""
    raised: list[BaseException] = []

    async def main() -> World:
        world = World(steps=8)
        step, numbers = world.trainer.step, list(in_a_row)

        async def reporting(batch: Batch) -> StepResult:
            result = await step(batch)
            number = numbers.pop(0) if numbers else 0
            result.metrics |= {"loss/nonfinite_in_a_row": float(number), "loss/skipped_nonfinite": float(number > 0)}
            return result

        world.trainer.step = reporting  # type: ignore[method-assign]
        try:
            await world.controller.run()
        except* RunError as errors:
            raised.append(errors.exceptions[0])
        return world

    return run_virtual(main()), raised[0] if raised else None


def test_a_few_in_a_row_are_gone_through_and_their_groups_are_trained_once() -> None:
    world, error = run([1, 2, 0, 2, 0])
    assert error is None
    assert (world.trainer.version, world.controller.gate.trained) == (8, 32)
    assert all(count == 1 for count in world.trained().values())


@pytest.mark.parametrize("numbers", [[3], [0, 1, 2, 4]])
def test_too_many_in_a_row_end_the_run_and_say_how_to_look_at_them(numbers: list[int]) -> None:
    world, error = run(numbers)
    assert str(error) == (
        f"{numbers[-1]} updates in a row had a loss or a gradient that is not finite, the last in step {len(numbers)}, "
        "and were skipped; see where it came from with: fleuve replay-step unused"
    )
    gate = world.controller.gate
    assert gate.trained == 4 * len(numbers)  # what was consumed is; nothing is trained again after a restart
    counted = sum(gate.count(state) for state in State) + gate.trained + sum(gate.dropped.values())
    assert gate.admitted == counted
    assert len(world.observer.steps) == len(numbers)  # the step itself is reported first
