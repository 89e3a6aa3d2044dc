"""The bounded queue in front of the verifier processes."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.rewards.door import Door


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_who_finds_no_room_waits_in_order() -> None:
    door = Door(count=1, size=100)
    order: list[int] = []

    async def visit(number: int) -> None:
        assert await door.enter(1, soon())
        order.append(number)
        await asyncio.sleep(0)
        door.leave(1)

    await asyncio.gather(*(visit(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]


async def test_who_finds_no_room_in_time_is_told_so_and_those_behind_it_go_on() -> None:
    door = Door(count=10, size=100)
    assert await door.enter(60, soon())
    large = asyncio.create_task(door.enter(50, soon(0.05)))
    await asyncio.sleep(0)
    small = asyncio.create_task(door.enter(30, soon()))  # there is room, but it is not its turn
    await asyncio.sleep(0.01)
    assert not small.done()
    assert not await large
    assert await small
    assert (door.inside, door.bytes, door.outside) == (2, 90, 0)


async def test_what_is_larger_than_the_room_gets_it_alone() -> None:
    door = Door(count=10, size=100)
    assert await door.enter(1, soon())
    large = asyncio.create_task(door.enter(1000, soon()))
    await asyncio.sleep(0)
    assert not large.done()
    door.leave(1)
    assert await large
    assert not await door.enter(1, soon(0.01))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["stay", "cancel", "late"])), max_size=30),
    st.integers(1, 4),
    st.randoms(),
)
def test_the_room_is_never_overfull_and_empty_in_the_end(visits, count, random) -> None:
    async def run() -> None:
        door = Door(count, size=100)
        held: list[int] = []

        async def visit(size: int, how: str) -> None:
            if await door.enter(size, soon(0.0 if how == "late" else 5.0)):
                held.append(size)
                # Who has been let in and not heard of it yet is in there too.
                assert len(held) <= door.inside <= count
                assert sum(held) <= door.bytes <= 100
                for _ in range(random.randrange(3)):
                    await asyncio.sleep(0)
                held.remove(size)
                door.leave(size)
            else:
                assert how == "late"

        tasks = [asyncio.create_task(visit(*each)) for each in visits]
        for task, (_, how) in zip(tasks, visits, strict=True):
            if how == "cancel":
                if random.random() < 0.5:
                    await asyncio.sleep(0)
                if not held:  # one that holds the room would have to leave it
                    task.cancel()
        async with asyncio.timeout(5.0):
            done = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [error for error in done if isinstance(error, Exception)]
        assert (door.inside, door.bytes, door.outside) == (len(held), sum(held), 0)

    asyncio.run(run())
