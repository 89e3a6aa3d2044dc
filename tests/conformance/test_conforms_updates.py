"""New weights in the middle of answers: every token is stamped by the version that sampled it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from subject import Subject

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.types import Interrupt

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_update_in_mid_answer_splits_it_in_two_versions_both_true(subject: Subject) -> None:
    """Pitfall 8."""
    request = subject.ask(subject.prompt(0), subject.long, seed=3)
    (answering,) = await subject.begin(request, tokens=5)
    updated = await subject.update()
    answer = await answering
    assert updated.interrupted == 1
    assert answer.interruptions == 1
    assert set(answer.versions) == {subject.version - 1, subject.version}
    subject.true(request, answer)


async def test_after_an_update_nothing_older_is_sampled(subject: Subject) -> None:
    requests = [subject.ask(subject.prompt(i // 4, 10 + i), subject.long, seed=i) for i in range(12)]
    answering = await subject.begin(*requests, tokens=24)
    await subject.update()
    assert await subject.engine.health() == subject.version
    late = subject.ask(subject.prompt(0), 20)
    (fresh,) = await subject.answers([late])
    assert set(fresh.versions) == {subject.version}
    for request, answer in zip(requests, await asyncio.gather(*answering), strict=True):
        assert answer.versions[-1] == subject.version
        subject.true(request, answer)


async def test_a_version_may_be_skipped(subject: Subject) -> None:
    """Pitfall 1: a newer version supersedes those before it."""
    request = subject.ask(subject.prompt(1), subject.long, seed=4)
    subject.publish(subject.version + 2)
    (answering,) = await subject.begin(request)
    await subject.update(by=2)
    answer = await answering
    assert set(answer.versions) == {subject.version - 2, subject.version}
    subject.true(request, answer)


async def test_several_updates_may_meet_one_answer(subject: Subject) -> None:
    request = subject.ask(subject.prompt(2), 2 * subject.long, seed=4)
    first = subject.version
    (answering,) = await subject.begin(request, tokens=10)
    for _ in range(3):
        await subject.update()
        await asyncio.sleep(0.03)
    answer = await answering
    assert answer.interruptions == 3
    assert {first, subject.version} <= set(answer.versions)
    subject.true(request, answer)


async def test_a_version_that_is_there_already_or_older_changes_nothing(subject: Subject) -> None:
    await subject.update()
    older, same = subject.publish(subject.version - 1), subject.publish(subject.version)
    request = subject.ask(subject.prompt(3), subject.long, seed=6)
    (answering,) = await subject.begin(request)
    for file in (same, older):
        reply = await subject.engine.update_weights(file, "recompute")
        assert (reply.version, reply.interrupted) == (subject.version, 0)
    answer = await answering
    assert (set(answer.versions), answer.interruptions) == ({subject.version}, 0)
    subject.true(request, answer)


async def test_keep_goes_on_under_the_old_cache(subject: Subject) -> None:
    subject.needs("keep")
    request = subject.ask(subject.prompt(4, 40), subject.long, seed=1)
    (answering,) = await subject.begin(request, tokens=5)
    await subject.update("keep")
    answer = await answering
    subject.well_formed(request, answer)
    assert set(answer.versions) == {subject.version - 1, subject.version}
    subject.near(answer.logprobs, subject.scorer.kept(request.input_ids, answer))  # type: ignore[arg-type]


async def test_finish_lets_the_answers_in_flight_end_first(subject: Subject) -> None:
    subject.needs("finish")
    begun = subject.ask(subject.prompt(5), subject.long, seed=1)
    (answering,) = await subject.begin(begun)
    old = subject.version
    updating = asyncio.create_task(subject.update("finish"))
    await asyncio.sleep(0.02)
    later = subject.ask(subject.prompt(6), 30, seed=2)
    after = asyncio.create_task(subject.generate(later))
    updated = await updating
    assert updated.interrupted == 0
    assert answering.done() or (await asyncio.wait({answering}, timeout=1.0))[0]
    assert (set((await answering).versions), (await answering).interruptions) == ({old}, 0)
    answer = await after
    assert len(set(answer.versions)) == 1
    subject.true(begun, await answering)
    subject.true(later, answer)


@pytest.mark.parametrize("interrupt", ["recompute", "keep"])
async def test_a_prompt_cached_under_older_weights_serves_no_new_answer(subject: Subject, interrupt: Interrupt) -> None:
    """Pitfall 14, with an answer to the same prompt in flight, and with one that has ended."""
    if interrupt == "keep":
        subject.needs("keep")
    prompt, ended = subject.prompt(7, 160), subject.prompt(8, 160)
    await subject.answers([subject.ask(ended, 5)])
    (answering,) = await subject.begin(subject.ask(prompt, subject.long))
    await subject.update(interrupt)
    requests = [subject.ask(prompt, 20, seed=1), subject.ask(ended, 20, seed=2)]
    for request, answer in zip(requests, await subject.answers(requests), strict=True):
        assert set(answer.versions) == {subject.version}
        subject.true(request, answer)
    await answering


async def test_nothing_is_sampled_while_paused_and_weights_can_be_swapped(subject: Subject) -> None:
    subject.needs("update-while-paused")
    request = subject.ask(subject.prompt(9), subject.long, seed=3)
    (answering,) = await subject.begin(request, tokens=3)
    await subject.engine.pause()
    before = (await subject.engine.metrics())["tokens_generated"]
    await subject.update()
    await asyncio.sleep(0.1)
    assert (await subject.engine.metrics())["tokens_generated"] == before
    assert not answering.done()
    await subject.engine.resume()
    answer = await answering
    assert set(answer.versions) == {subject.version - 1, subject.version}
    subject.true(request, answer)


@pytest.mark.parametrize("order", list(itertools.permutations(["resume", "submit", "update"])), ids="-".join)
async def test_resume_submit_and_update_may_come_in_any_order(subject: Subject, order: tuple[str, ...]) -> None:
    """Pitfall 2: pause and resume are idempotent, and race with everything."""
    subject.needs("update-while-paused")
    request = subject.ask(subject.prompt(10), 40, seed=1)
    await subject.engine.pause()
    await subject.engine.pause()
    tasks: dict[str, asyncio.Task[object]] = {}
    for what in order:
        if what == "submit":
            tasks[what] = asyncio.create_task(subject.generate(request))
        elif what == "update":
            tasks[what] = asyncio.create_task(subject.update())
        else:
            await subject.engine.resume()
            await subject.engine.resume()
        await asyncio.sleep(0)
    _, answer = await asyncio.wait_for(asyncio.gather(tasks["update"], tasks["submit"]), 60)
    subject.true(request, answer)


def with_a_flipped_bit(path: Path) -> Path:
    """A copy beside it."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    torn = path.with_name("torn.safetensors")
    torn.write_bytes(content)
    return torn


async def test_weights_that_are_not_whole_are_refused_and_the_old_ones_serve_on(subject: Subject) -> None:
    subject.needs("weight-checks")
    good = subject.publish(subject.version + 1)
    torn = with_a_flipped_bit(Path(good.path))
    request = subject.ask(subject.prompt(11), subject.long, seed=3)
    (answering,) = await subject.begin(request)
    for bad in (
        msgspec.structs.replace(good, path=str(torn)),
        msgspec.structs.replace(good, path=str(torn) + ".gone"),
        msgspec.structs.replace(good, bytes=good.bytes + 8),
    ):
        with pytest.raises(RolloutError) as refused:
            await subject.engine.update_weights(bad, "recompute")
        assert not isinstance(refused.value, WorkerLostError)
        assert await subject.engine.health() == subject.version
    answer = await answering
    assert set(answer.versions) == {subject.version}
    subject.true(request, answer)
    await subject.update()
    assert np.unique((await subject.answers([subject.ask(subject.prompt(1), 3)]))[0].versions) == [subject.version]
