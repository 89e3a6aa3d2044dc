"""A NaN or an infinity in an update: skipped, counted, kept, and found again by `fleuve replay-step`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny import make_batch, make_trainer, same_weights, save_tiny_model, settings_for, weights_of

from fleuve.errors import UserError
from fleuve.observe.failed import KEPT, failed_files, read_failed, save_failed
from fleuve.train.replay import replay
from fleuve.train.replay_command import replay_step, weights_of_step
from fleuve.train.trainer import Trainer
from fleuve.types import Batch

UNCAPPED = {"cap": "none"}
"""With the default cap, a token whose weight is NaN is masked."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def poisoned(version: int = 0, group: int = 1, answer: int = 0, token: int = 1, value: float = math.nan) -> Batch:
    """A batch with one recorded log-probability that is not finite."""
    batch = make_batch(seed=version, version=version, oldest=version)
    bad = batch.groups[group].trajectories[answer]
    bad.loss_mask[:] = True
    bad.logprobs[token] = value
    return batch


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, moments and steps of everything that learns."""
    state = {name: t.detach().clone() for name, t in trainer.optimizer.state().items()}
    if trainer.critic is not None:
        state |= {f"critic/{name}": t.detach().clone() for name, t in trainer.critic.state().items()}
    return state


CRITIC = {"baseline": "critic", "normalise": "batch", **UNCAPPED}


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": UNCAPPED},
        {"algorithm": UNCAPPED, "trainer": {"minibatches": 1, "dtype": "bfloat16"}},
        {"algorithm": CRITIC, "critic": {"backbone": "own"}},
        {"algorithm": CRITIC, "critic": {"backbone": "shared"}},
    ],
    ids=["fp32", "bf16", "critic", "shared critic"],
)
def test_a_skipped_update_leaves_weights_and_moments_as_they_were_bit_for_bit(
    model: Path, tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    sections = {**sections, "trainer": {"minibatches": 1, **sections.get("trainer", {})}}
    trainer = make_trainer(model, tmp_path / "w", **sections)
    trainer.step(make_batch())  # so that there are moments
    before = whole_state(trainer)
    result = trainer.step(poisoned(version=1))
    assert (result.version, result.trained) == (2, [100, 101, 102, 103])  # consumed: nothing is trained twice
    assert result.metrics["loss/skipped_nonfinite"] == 1.0
    assert same_weights(before, whole_state(trainer))
    assert trainer.step(make_batch(seed=2, version=2, oldest=2)).metrics["loss/skipped_nonfinite"] == 0.0
    assert not same_weights(before, whole_state(trainer))


@pytest.mark.parametrize("sick", ["policy", "critic"])
def test_neither_policy_nor_critic_learns_where_the_other_s_gradient_is_not_finite(
    model: Path, tmp_path: Path, sick: str
) -> None:
    trainer = make_trainer(model, tmp_path / "w", algorithm=CRITIC, trainer={"minibatches": 1})
    trainer.step(make_batch())
    assert trainer.critic is not None
    optimizer = trainer.optimizer if sick == "policy" else trainer.critic.optimizer
    parameter = next(iter(optimizer.parameters.values()))
    hook = parameter.register_hook(lambda gradient: gradient * math.inf)
    before = whole_state(trainer)
    assert trainer.step(make_batch(seed=1, version=1, oldest=1)).metrics["loss/skipped_nonfinite"] == 1.0
    assert same_weights(before, whole_state(trainer))
    hook.remove()
    assert trainer.step(make_batch(seed=2, version=2, oldest=2)).metrics["loss/skipped_nonfinite"] == 0.0


def test_skipped_updates_are_counted_in_a_row_across_steps(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w", algorithm=UNCAPPED)  # 2 updates a step, of 2 groups each

    def in_a_row(batch: Batch) -> float:
        return trainer.step(batch).metrics["loss/nonfinite_in_a_row"]

    assert in_a_row(make_batch(version=0)) == 0
    assert in_a_row(poisoned(version=1, group=2)) == 1  # the second of the two
    assert in_a_row(poisoned(version=2, group=0)) == 0  # the first; the second was made
    assert in_a_row(poisoned(version=3, group=3)) == 1
    both = poisoned(version=4, group=0)
    both.groups[3] = poisoned(version=4, group=3).groups[3]
    assert in_a_row(both) == 3


@pytest.mark.parametrize(
    ("value", "part"), [(math.nan, "recorded log-probability nan"), (math.inf, "recorded log-probability inf")]
)
def test_a_replay_finds_the_answer_and_the_token(model: Path, tmp_path: Path, value: float, part: str) -> None:
    trainer = make_trainer(model, tmp_path / "w", algorithm=UNCAPPED)
    first, second = replay(trainer, poisoned(group=2, answer=0, token=1, value=value))
    assert all(a.finite for a in first.answers)
    (broken,) = [a for a in second.answers if not a.finite]
    assert (broken.group, broken.answer) == (102, 0)
    assert broken.first is not None
    assert f"{broken.first.part} {broken.first.value}" == part
    assert broken.first.index == 1


def test_answers_one_by_one_add_up_to_the_update(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w", trainer={"minibatches": 1})
    (whole,) = replay(trainer, make_batch())
    again = make_trainer(model, tmp_path / "again", trainer={"minibatches": 1})
    metrics = again.step(make_batch()).metrics
    assert whole.norm == metrics["loss/grad_norm"]
    assert whole.loss == metrics["loss/policy"]
    assert sum(a.loss for a in whole.answers) == pytest.approx(whole.loss, abs=1e-5)
    assert same_weights(weights_of(trainer), weights_of(again))


def test_weights_that_are_not_finite_are_told_from_data_that_are_not(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    with torch.no_grad():
        trainer.optimizer.masters["model.norm.weight"][0] = math.inf
    found = replay(trainer, make_batch())
    firsts = [a.first.part for m in found for a in m.answers if a.first is not None]
    assert firsts
    assert set(firsts) == {"log-probability"}


def failing_run(model: Path, tmp_path: Path) -> tuple[Path, Trainer]:
    """Two good steps, a checkpoint, two that fail as a whole, another checkpoint, one that fails in part."""
    run = tmp_path / "run"
    settings = settings_for(model, algorithm=UNCAPPED)
    trainer = make_trainer(model, tmp_path / "w", algorithm=UNCAPPED)
    for version in range(2):
        trainer.step(make_batch(seed=version, version=version, oldest=version))
    checkpoint(trainer, run)
    for version in range(2, 5):
        batch = poisoned(version=version, group=0)
        if version < 4:
            batch.groups[3] = poisoned(version=version, group=3).groups[3]
        result = trainer.step(batch)
        save_failed(run, settings.model_dump(mode="json"), batch, result.metrics)
        if version == 3:
            checkpoint(trainer, run)
    return run, trainer


def checkpoint(trainer: Trainer, run: Path) -> None:
    path = run / "checkpoints" / f"step-{trainer.version:06d}"
    trainer.save(path)
    (path / "COMMITTED").touch()


def test_a_failed_step_is_taken_again_from_the_weights_that_it_began_with(model: Path, tmp_path: Path) -> None:
    run, _ = failing_run(model, tmp_path)
    shown = replay_step(run, 4)
    assert "step 4: 4 groups, 12 answers" in shown
    assert "weights: those that the step began with" in shown
    assert "update 1: loss nan, gradient nan: skipped" in shown
    assert "recorded log-probability nan of token 1 (id " in shown
    assert shown == replay_step(run / "failed" / "step-000004.msgpack", None)
    newest = replay_step(run, None)
    assert newest.startswith("step 5:")
    assert "update 2: loss nan" not in newest


def test_weights_are_the_same_where_every_step_between_left_them_alone(model: Path, tmp_path: Path) -> None:
    run, _ = failing_run(model, tmp_path)
    chosen = {f.step: weights_of_step(run, f) for f in map(read_failed, failed_files(run))}
    assert {step: (w.version, w.exact) for step, w in chosen.items()} == {3: (2, True), 4: (2, True), 5: (4, True)}
    (run / "checkpoints" / "step-000002" / "COMMITTED").unlink()
    (run / "failed" / "step-000004.msgpack").unlink()  # whether step 4 changed anything is not known any more
    assert {f.step: weights_of_step(run, f).exact for f in map(read_failed, failed_files(run))} == {3: False, 5: True}
    assert "which no checkpoint has: what follows may differ" in replay_step(run, 3)


def test_only_the_newest_failed_batches_are_kept(tmp_path: Path) -> None:
    for version in range(KEPT + 3):
        save_failed(tmp_path, {}, poisoned(version=version), {"loss/skipped_nonfinite": 1.0})
    assert [read_failed(f).step for f in failed_files(tmp_path)] == list(range(4, KEPT + 4))
    assert sorted(p.suffix for p in (tmp_path / "failed").iterdir()) == [".msgpack"] * KEPT


def test_what_is_no_failed_step_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no failed/step-\*.msgpack: no update of its last steps was skipped"):
        replay_step(tmp_path, None)
    save_failed(tmp_path, {}, poisoned(), {})
    with pytest.raises(UserError, match="has no such failed step, only 1"):
        replay_step(tmp_path, 7)
    (tmp_path / "failed" / "step-000001.msgpack").write_bytes(b"\x01")
    with pytest.raises(UserError, match="is no batch of a failed step"):
        replay_step(tmp_path, 1)
