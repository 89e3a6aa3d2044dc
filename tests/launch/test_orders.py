"""Orders to a run that goes on: carried out, refused, or not answered; each in a line."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))
from mortal import Hospital, fleet_of
from world import Notes

from fleuve.control.fleet import Fleet
from fleuve.control.health import Health
from fleuve.errors import UserError
from fleuve.launch.orders import ORDERS, Order, carry_out, give_order, take_orders


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").touch()
    return tmp_path


async def asked(run: Path, fleet: Fleet, *orders: Order) -> list[list[str]]:
    """What a run with this fleet replies."""
    tasks = [asyncio.ensure_future(take_orders(run, fleet)), asyncio.ensure_future(fleet.tend())]
    try:
        return [await asyncio.to_thread(give_order, run, order) for order in orders]
    finally:
        for task in tasks:
            task.cancel()


async def test_workers_are_shown_added_and_removed(run):
    hospital = Hospital(2, start_seconds=0.0)
    fleet = fleet_of(hospital, Notes())
    shown, added, removed, _, shown_then = await asked(
        run,
        fleet,
        Order("show"),
        Order("add"),
        Order("remove", "worker-0", at_once=True),
        Order("show"),
        Order("show"),
    )
    assert [line.split() for line in shown] == [
        ["worker-0", "healthy", "version", "0", "0", "answers"],
        ["worker-1", "healthy", "version", "0", "0", "answers"],
    ]
    assert added[0].startswith("worker-2 is being started")
    assert removed == ["worker-0 leaves now; others take its answers up"]
    assert [line.split()[:2] for line in shown_then] == [["worker-1", "healthy"], ["worker-2", "healthy"]]
    assert fleet.states()["worker-2"] is Health.HEALTHY
    assert list((run / ORDERS).iterdir()) == []


async def test_what_cannot_be_done_is_refused_in_a_line(run):
    fleet = fleet_of(Hospital(1), Notes())
    with pytest.raises(UserError, match="worker-0 is the last worker"):
        await asked(run, fleet, Order("remove", "worker-0"))
    with pytest.raises(UserError, match="there is no worker w: there are worker-0"):
        await asked(run, fleet, Order("remove", "w"))
    with pytest.raises(UserError, match="there is a worker worker-0 already"):
        await asked(run, fleet, Order("add", "worker-0"))


@pytest.mark.parametrize("content", [b"", b"{", b'{"what": "explode"}', b'{"what": "add", "worker": 3}', b"[]"])
async def test_an_order_that_makes_no_sense_is_refused(content):
    assert not carry_out(content, fleet_of(Hospital(1), Notes())).done


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "a b", "x" * 100])
async def test_a_workers_name_is_a_plain_file_name(name):
    fleet = fleet_of(Hospital(1), Notes())
    reply = carry_out(json.dumps({"what": "add", "worker": name}).encode(), fleet)
    assert not reply.done
    assert list(fleet.workers) == ["worker-0"]


def test_where_nobody_replies_the_order_is_withdrawn(run):
    with pytest.raises(UserError, match=r"nobody replied within 0\.2 s"):
        give_order(run, Order("add"), patience=0.2)
    assert list((run / ORDERS).iterdir()) == []


async def test_an_order_that_nobody_waits_for_any_more_is_not_carried_out(run):
    (run / ORDERS).mkdir()
    (run / ORDERS / "0.order.json").write_text('{"what": "add"}')
    fleet = fleet_of(Hospital(1), Notes())
    shown = await asked(run, fleet, Order("show"))
    assert len(shown[0]) == 1


def test_a_directory_that_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        give_order(tmp_path, Order("show"))
