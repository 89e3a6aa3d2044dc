"""A sample of `python tests/chaos`: real runs whose processes are killed and stopped at random; and the books."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from chaos_books import ledger
from chaos_plan import BATCH, KINDS, PROMPTS, STEPS, draw
from chaos_run import play

from fleuve.control.journal import Admitted, Dropped, Ready, Record, Step
from fleuve.types import Prompt


@pytest.mark.parametrize("seed", [45, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (7, 203))])
def test_a_run_whose_processes_are_killed_and_stopped_is_whole_in_the_end(tmp_path: Path, seed: int) -> None:
    plan = draw(seed)
    outcome = play(plan, tmp_path)
    assert outcome.wrong == [], f"{plan.describe()}\n{outcome.line()}"
    assert len(outcome.done) >= 2


def test_a_seed_is_a_plan_and_a_hundred_hit_every_kind_in_every_way() -> None:
    plans = [draw(seed) for seed in range(100)]
    assert plans == [draw(seed) for seed in range(100)]
    hits = Counter((fault.kind, fault.action) for plan in plans for fault in plan.faults)
    assert set(hits) == {(kind, action) for kind in KINDS for action in ("kill", "stop", "pause")}
    assert sum(plan.exact for plan in plans) >= 5
    assert sum(plan.verifier == "code" for plan in plans) >= 10
    assert sum(plan.ranks > 1 for plan in plans) >= 10
    assert all(any(fault.kind == "trainer" for fault in plan.faults) for plan in plans if plan.ranks > 1)


def journal() -> list[Record]:
    """Of a run in which every group is trained as it was admitted."""
    records: list[Record] = []
    for step in range(STEPS):
        groups = list(range(step * BATCH, (step + 1) * BATCH))
        for group in groups:
            prompt = Prompt(id=f"e{group // PROMPTS}/{group % PROMPTS}", input_ids=[1], text="", answer="")
            records.append(Admitted(group=group, prompt=prompt, version=step))
            records.append(Ready(group=group, trajectories=[], admitted_version=step))
        records.append(Step(version=step + 1, groups=groups, trained=groups))
    return records


def test_a_journal_in_which_each_group_is_trained_once_balances() -> None:
    assert list(ledger(journal())) == []


def test_a_journal_that_lacks_a_record_does_not_balance() -> None:
    for number in range(len(journal())):
        records = journal()
        left_out = records.pop(number)
        assert list(ledger(records)) != [], left_out


def test_a_journal_that_has_a_record_twice_does_not_balance() -> None:
    for number, record in enumerate(journal()):
        records = journal()
        records.insert(number, record)
        sampled_again = isinstance(record, Ready)  # its answers are written again then
        assert (list(ledger(records)) == []) == sampled_again, record


def test_a_prompt_that_was_dropped_and_never_came_again_is_missed() -> None:
    last = max(record.group for record in journal() if isinstance(record, Admitted))
    records = [r for r in journal() if not isinstance(r, Ready) or r.group != last]
    records[-1] = Dropped(group=last, reason="no verdict", again=True)
    assert any("never trained" in violation for violation in ledger(records))
