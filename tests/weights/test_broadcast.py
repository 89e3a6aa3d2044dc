"""Weights by broadcast, between real processes over gloo: whole and right for each, or an error in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from receiver import Outcome, Task, digest_of

from fleuve.types import Invitation, UpdateRequest, WeightFile, encode
from fleuve.weights.broadcast import Receiver, Sender
from fleuve.weights.group import BroadcastError, own_address
from fleuve.weights.invitation import Call, Loss
from fleuve.weights.store import WeightStore, read_weights

ROOT = Path(__file__).parents[2]
BUCKET = 1 << 20
SECONDS = 60.0  # of a busy machine; where somebody is missing on purpose, less is given


class Process:
    """A receiver in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.child = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "receiver.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = ThreadPoolExecutor(max_workers=1)

    def read(self) -> str:
        """The next line; empty if it has ended."""
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    def receive(self, weights: WeightFile, sender: Sender, number: int, **more: object) -> Future[Outcome]:
        """Invite it."""
        seconds = more.pop("seconds", SECONDS)
        invitation = Invitation(
            address=sender.hall.address, key=sender.hall.key, number=number, member=self.name, seconds=seconds
        )
        task = Task(weights=weights, invitation=invitation, **more)
        assert self.child.stdin is not None
        self.child.stdin.write(msgspec.json.encode(task).decode() + "\n")
        self.child.stdin.flush()
        return self._thread.submit(lambda: msgspec.json.decode(self.read() or '{"error": "it died"}', type=Outcome))

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self._thread.shutdown()


def start(*names: str) -> list[Process]:
    """Receivers that are there."""
    started = [Process(name) for name in names]
    for process in started:
        assert process.read()
    return started


@pytest.fixture(scope="module")
def three() -> Iterator[list[Process]]:
    started = start("a", "b", "c")
    yield started
    for process in started:
        process.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    store = WeightStore(tmp_path / "weights", keep=9)
    yield store
    store.close()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender("127.0.0.1", "cpu", SECONDS, BUCKET)
    yield sender
    sender.close()


def publish(store: WeightStore, version: int, megabytes: int = 3) -> WeightFile:
    """Several buckets, none of which ends where a tensor does."""
    torch.manual_seed(version)
    half = torch.randn(megabytes << 17) + version
    return store.publish(version, [("a", half), ("b.c", torch.randn(7, 3).bfloat16()), ("d", half * 2)])


def members(processes: list[Process]) -> dict[str, int]:
    return {process.name: 1 for process in processes}


def test_three_processes_get_what_was_published_version_after_version_in_one_group(three, store, sender):
    for version in (1, 2, 3):
        file = publish(store, version)
        asked = [process.receive(file, sender, version) for process in three]
        assert sender.send(Call(number=version, weights=file, members=members(three))) == ["a", "b", "c"]
        assert {outcome.result(SECONDS).digest for outcome in asked} == {digest_of(read_weights(file))}
    assert sender._groups == 1


def test_who_comes_late_costs_itself_alone_and_is_in_the_next_one_again(three, store, sender):
    sender._seconds = 2.0
    first, second = publish(store, 1), publish(store, 2)
    asked = [process.receive(first, sender, 1) for process in three[:2]]
    assert sender.send(Call(number=1, weights=first, members=members(three))) == ["a", "b"]
    assert {outcome.result(SECONDS).digest for outcome in asked} == {digest_of(read_weights(first))}
    late = three[2].receive(first, sender, 1).result(SECONDS)
    assert (
        late.error == "weights of version 1, by broadcast: it began before this worker had come, or is of other weights"
    )
    sender._seconds = SECONDS
    asked = [process.receive(second, sender, 2) for process in three]
    assert sender.send(Call(number=2, weights=second, members=members(three))) == ["a", "b", "c"]
    assert {outcome.result(SECONDS).digest for outcome in asked} == {digest_of(read_weights(second))}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"checksum": "crc32:00000000"}, "checksum crc32:[0-9a-f]{8}, published was crc32:00000000"),
        ({"version": 8}, "are of version 7, expected were those of 8"),
    ],
)
def test_what_arrives_and_is_not_what_was_published_is_refused(three, store, sender, wrong, said):
    """All were told so: it turns out when all is there."""
    file = msgspec.structs.replace(publish(store, 7), **wrong)
    asked = [process.receive(file, sender, 1) for process in three[:2]]
    sender.send(Call(number=1, weights=file, members={"a": 1, "b": 1}))
    for outcome in asked:
        assert re.search(said, outcome.result(SECONDS).error)
        assert "what was broadcast" in outcome.result().error


@pytest.mark.parametrize("wrong", [{"version": 8}, {"bytes": BUCKET // 2}, {"checksum": "crc32:00000000"}])
def test_who_was_told_of_other_weights_takes_no_part(three, store, sender, wrong):
    file = publish(store, 7)
    outcome = three[0].receive(msgspec.structs.replace(file, **wrong), sender, 1)
    other = three[1].receive(file, sender, 1)
    assert sender.send(Call(number=1, weights=file, members={"a": 1, "b": 1})) == ["b"]
    assert "or is of other weights" in outcome.result(SECONDS).error
    assert other.result(SECONDS).digest == digest_of(read_weights(file))


def test_where_nobody_comes_it_is_over_in_time(store, sender):
    sender._seconds = 0.3
    with pytest.raises(BroadcastError, match=r"none of 2 workers came for it within 0\.3 s"):
        sender.send(Call(number=1, weights=publish(store, 1), members={"x": 1, "y": 2}))


def test_who_is_known_to_be_lost_is_not_waited_for(three, store, sender):
    file = publish(store, 1)
    outcome = three[0].receive(file, sender, 1)
    sender.lose(Loss(number=1, member="gone"))
    began = time.monotonic()
    assert sender.send(Call(number=1, weights=file, members={"a": 1, "gone": 1})) == ["a"]
    assert time.monotonic() - began < SECONDS / 2
    assert outcome.result(SECONDS).digest == digest_of(read_weights(file))


def test_a_member_of_several_processes_is_in_with_all_of_them_or_not_at_all(three, store, sender):
    sender._seconds = 2.0
    file = publish(store, 1)
    half, whole = three[0].receive(file, sender, 1), three[1].receive(file, sender, 1)
    assert sender.send(Call(number=1, weights=file, members={"a": 2, "b": 1})) == ["b"]
    assert "before this worker had come" in half.result(SECONDS).error
    assert whole.result(SECONDS).digest == digest_of(read_weights(file))


def test_a_sender_that_is_not_there_is_one_line():
    file = WeightFile(version=3, path="/w/x", bytes=10, checksum="crc32:00000000")
    invitation = Invitation(address="127.0.0.1:1", key="k", number=1, member="a", seconds=1.0)
    with pytest.raises(BroadcastError, match=r"^weights of version 3, by broadcast: ") as caught:
        Receiver().read(file, invitation)
    assert "\n" not in str(caught.value)


def test_no_memory_is_left_behind_by_what_failed_or_was_dropped(three, store, sender):
    file = publish(store, 1)
    outcome = three[0].receive(file, sender, 1)
    sender.send(Call(number=1, weights=file, members={"a": 1}))
    assert outcome.result(SECONDS).digest
    maps = Path(f"/proc/{three[0].child.pid}/maps").read_text()
    assert "fleuve-weights" not in maps
    assert not any("fleuve-weights" in os.readlink(fd) for fd in Path(f"/proc/{three[0].child.pid}/fd").iterdir())


def test_an_update_by_file_says_nothing_of_broadcasts_on_the_wire():
    """Engines that know of none get what they always got."""
    body = UpdateRequest(version=1, path="/w/x", bytes=1, checksum="crc32:00000000")
    assert set(msgspec.msgpack.decode(encode(body))) == {"version", "path", "bytes", "checksum", "interrupt"}


def test_the_address_on_the_way_to_this_machine_is_this_machine_s():
    assert own_address("127.0.0.1:9") == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "rank", "told"),
    [
        (signal.SIGKILL, 0, True),
        (signal.SIGKILL, 2, True),
        (signal.SIGSTOP, 1, True),
        (signal.SIGKILL, 1, False),
        (signal.SIGKILL, 2, False),
    ],
)
def test_one_that_ends_in_mid_broadcast_holds_the_others_up_for_a_moment_only(store, sender, number, told, rank):
    """The others have the weights, or are told that they do not, within the seconds given; once the sender hears of the
    loss (`told`), at once. The next broadcast is theirs."""
    sender._seconds = seconds = 20.0
    processes = start("a", "b", "c")
    try:
        first, second = publish(store, 1, megabytes=64), publish(store, 2)
        asked = [
            process.receive(first, sender, 1, seconds=seconds, ends=(5, int(number)) if i == rank else None)
            for i, process in enumerate(processes)
        ]
        lost, others = processes[rank], [p for i, p in enumerate(processes) if i != rank]
        if told:

            def tell() -> None:
                deadline = time.monotonic() + SECONDS
                while not _over(lost.child.pid) and time.monotonic() < deadline:
                    time.sleep(0.05)
                sender.lose(Loss(number=1, member=lost.name))

            threading.Thread(target=tell, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(BroadcastError):
            sender.send(Call(number=1, weights=first, members=members(processes)))
        outcomes = [outcome.result(SECONDS) for i, outcome in enumerate(asked) if i != rank]
        assert time.monotonic() - began < (seconds / 2 if told else 2 * seconds)
        want = digest_of(read_weights(first))
        assert all(outcome.digest == want or (outcome.error and not outcome.digest) for outcome in outcomes)
        asked = [process.receive(second, sender, 2) for process in others]
        assert sender.send(Call(number=2, weights=second, members=members(others))) == [p.name for p in others]
        assert {outcome.result(SECONDS).digest for outcome in asked} == {digest_of(read_weights(second))}
    finally:
        for process in processes:
            process.close()


def _over(pid: int) -> bool:
    """Whether it has ended, or stands still."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except FileNotFoundError:
        return True
