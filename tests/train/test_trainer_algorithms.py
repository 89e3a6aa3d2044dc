"""Whole steps with the parts that the settings may ask for: regularisers, a critic, half precision; and what becomes of
them when a step is cut short or continued from a checkpoint."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_batch, make_trainer, same_weights, save_tiny_model, weights_of

from fleuve.config.presets import PRESETS
from fleuve.train.microbatch import evaluate_samples, make_micro_batches, sample_of
from fleuve.train.policy import Policy
from fleuve.train.trainer import Trainer
from fleuve.types import Batch

BACKBONES = ["own", "shared"]
CRITIC: dict[str, Any] = {"baseline": "critic", "normalise": "batch"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _tied(batch: Batch, groups: slice = slice(None)) -> Batch:
    for group in batch.groups[groups]:
        for t in group.trajectories:
            t.reward = 1.0
    return batch


def _everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and optimisers' states, copied."""
    state = {n: t.clone() for n, t in trainer.optimizer.state().items()}
    if trainer.critic is not None:
        state |= {f"critic/{n}": t.clone() for n, t in trainer.critic.state().items()}
    return state


def _score(policy: Policy, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of every learnt token."""
    samples = [sample_of(t, t.loss_mask) for t in batch.trajectories]
    parts = make_micro_batches(samples, 1000)
    with torch.no_grad():
        return tuple(  # type: ignore[return-value]
            torch.cat(evaluate_samples(samples, parts, lambda m, i=i: policy.logprobs(m, entropy=True)[i]))  # type: ignore[misc]
            for i in (0, 1)
        )


def _finite(trainer: Trainer, metrics: dict[str, float]) -> None:
    assert all(bool(t.isfinite().all()) for t in _everything(trainer).values())
    assert {k: v for k, v in metrics.items() if not math.isfinite(v)} == {}


# --- regularisers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_pulls_towards_the_reference_even_where_rewards_tie(
    model: Path, tmp_path: Path, estimator: str
) -> None:
    """Whatever the estimator shows, its gradient is right: k1's own would have no direction at all."""
    other = save_tiny_model(tmp_path / "other", scale=6.0)
    trainer = make_trainer(
        model,
        tmp_path / "w",
        algorithm={"kl_coefficient": 1.0, "kl_estimator": estimator, "reference": str(other), "cap": "none"},
        trainer={"learning_rate": 3e-3},
    )
    assert trainer.reference is not None
    batch = _tied(make_batch(groups=4, size=6))
    distances = []
    for version in range(8):
        batch.version = version
        for t, now in zip(batch.trajectories, _per_answer(trainer, batch), strict=True):
            t.logprobs[t.loss_mask] = now
        here, there = _score(trainer.policy, batch)[0], _score(trainer.reference, batch)[0]
        distances.append(float((here - there).square().mean()))
        metrics = trainer.step(batch).metrics
        assert metrics["loss/skipped_minibatches"] == 0
        assert metrics["advantage/zero_fraction"] == 1.0
    assert distances[-1] < 0.5 * distances[0]


def _per_answer(trainer: Trainer, batch: Batch) -> list[np.ndarray]:
    lengths = [int(t.loss_mask.sum()) for t in batch.trajectories]
    return [x.numpy() for x in _score(trainer.policy, batch)[0].split(lengths)]


def test_at_the_first_update_the_reference_is_the_policy_and_pulls_nowhere(model: Path, tmp_path: Path) -> None:
    """Bit for bit, in both precisions: the reference is loaded as the policy computes."""
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(
            model,
            tmp_path / dtype,
            algorithm={"kl_coefficient": 1.0},
            trainer={"minibatches": 1, "dtype": dtype},
        )
        before = weights_of(trainer)
        metrics = trainer.step(_tied(make_batch())).metrics
        assert metrics["loss/policy"] == metrics["loss/grad_norm"] == 0.0
        assert metrics["loss/skipped_minibatches"] == 1.0
        assert same_weights(before, weights_of(trainer))


@pytest.mark.parametrize(("coefficient", "rises"), [(0.1, True), (-0.1, False)])
def test_an_entropy_bonus_raises_entropy_and_a_penalty_lowers_it(
    model: Path, tmp_path: Path, coefficient: float, rises: bool
) -> None:
    trainer = make_trainer(model, tmp_path / "w", algorithm={"entropy_coefficient": coefficient})
    metrics = [trainer.step(_tied(make_batch(version=v))).metrics for v in range(5)]
    entropies = [row["loss/entropy"] for row in metrics]
    assert all((b > a) == rises for a, b in itertools.pairwise(entropies))
    assert metrics[0]["loss/policy"] == pytest.approx(-coefficient * entropies[0], rel=0.1)


@pytest.mark.parametrize("preset", [p for p in PRESETS if PRESETS[p].get("baseline", "group") != "critic"])
def test_a_step_without_signal_and_without_regulariser_is_skipped_by_every_preset(
    model: Path, tmp_path: Path, preset: str
) -> None:
    """Without a baseline, equal rewards whitened over the batch are no signal either."""
    batch = _tied(make_batch())
    trainer = make_trainer(model, tmp_path / "w", algorithm={"preset": preset, "overlong_buffer": 0.0})
    before = _everything(trainer)
    result = trainer.step(batch)
    assert (result.version, len(result.trained)) == (1, 4)
    assert result.metrics["loss/skipped_minibatches"] == 2.0
    assert result.advantages == [[0.0] * 3] * 4
    assert same_weights(before, _everything(trainer))


def test_a_reward_that_is_no_number_is_left_out_of_the_metrics_too(model: Path, tmp_path: Path) -> None:
    batch = make_batch()
    batch.groups[0].trajectories[1].reward = math.nan
    batch.groups[1].trajectories[1].reward = math.inf
    trainer = make_trainer(model, tmp_path / "w")
    result = trainer.step(batch)
    _finite(trainer, result.metrics)
    assert [row[1] is None for row in result.advantages] == [True, True, False, False]


@pytest.mark.parametrize("preset", PRESETS)
def test_hostile_batches_leave_every_preset_finite(model: Path, tmp_path: Path, preset: str) -> None:
    """Huge rewards, weights far out in both directions, answers of one token or none, a lone answer, a rejected group,
    all in one batch."""
    batch = make_batch(groups=8, size=4, version=2)
    far, huge, short, empty, lone, rejected, naught, _ = batch.groups
    for i, t in enumerate(far.trajectories):
        t.logprobs += (-1) ** i * 100
    huge.trajectories[1].reward, huge.trajectories[2].reward = 1e200, -1.7e308
    for t in short.trajectories:
        t.output_ids, t.logprobs, t.versions = t.output_ids[:1], t.logprobs[:1], t.versions[:1]
        t.loss_mask = np.ones(1, np.bool_)
    t = empty.trajectories[0]
    t.output_ids, t.logprobs, t.versions, t.loss_mask = (
        x[:0] for x in (t.output_ids, t.logprobs, t.versions, t.loss_mask)
    )
    del lone.trajectories[1:]
    for t in rejected.trajectories:
        t.reward = None
    for t in naught.trajectories:
        t.loss_mask = np.zeros_like(t.loss_mask)
    trainer = make_trainer(
        model,
        tmp_path / "w",
        algorithm={"preset": preset, "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
        control={"batch_size": 8},
        trainer={"minibatches": 4},
    )
    trainer.version = 2
    before = weights_of(trainer)
    result = trainer.step(batch)
    _finite(trainer, result.metrics)
    assert (result.version, len(result.trained)) == (3, 8)
    assert result.metrics["loss/skipped_nonfinite"] == 0
    assert not same_weights(before, weights_of(trainer))


# --- the critic -----------------------------------------------------------------------------------------------------


def _with_critic(
    model: Path, store: Path, backbone: str, trainer: dict[str, Any] | None = None, **critic: Any
) -> Trainer:
    settings = {"backbone": backbone, "learning_rate": 3e-3, "coefficient": 1.0, **critic}
    return make_trainer(model, store, algorithm=CRITIC, critic=settings, trainer=trainer or {})


def _foretold(version: int) -> Batch:
    """Answers whose reward their first token says. What samples them is fixed, so that only the critic learns."""
    batch = make_batch(seed=0, version=version, groups=8, size=4)
    for t in batch.trajectories:
        t.reward = float(t.output_ids[0] % 2)
        t.loss_mask[:] = True
    return batch


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_critic_comes_to_explain_the_rewards(model: Path, tmp_path: Path, backbone: str, dtype: str) -> None:
    trainer = _with_critic(
        model, tmp_path / "w", backbone, {"dtype": dtype, "learning_rate": 3e-3, "token_budget": 512}, clip=0.0
    )
    explained = []
    for version in range(30):
        metrics = trainer.step(_foretold(version)).metrics
        explained.append(metrics["critic/explained_variance"])
        _finite(trainer, metrics)
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # the head is zero
    assert explained[-1] > 0.5
    assert metrics["critic/value_mean"] == pytest.approx(
        np.mean([t.reward for t in _foretold(0).trajectories]), abs=0.2
    )


@pytest.mark.parametrize("backbone", BACKBONES)
def test_while_the_critic_warms_up_the_policy_stays_bit_for_bit(model: Path, tmp_path: Path, backbone: str) -> None:
    trainer = _with_critic(model, tmp_path / "w", backbone, warmup_steps=3)
    policy, critic = {n: t.clone() for n, t in trainer.optimizer.state().items()}, None
    for version in range(3):
        result = trainer.step(make_batch(seed=version, version=version))
        assert (result.version, len(result.trained)) == (version + 1, 4)
        assert "loss/grad_norm" not in result.metrics
        assert result.metrics["critic/grad_norm"] > 0
        assert same_weights(policy, trainer.optimizer.state())
        assert critic is None or not same_weights(critic, trainer.critic.state())
        critic = {n: t.clone() for n, t in trainer.critic.state().items()}
        _finite(trainer, result.metrics)
    result = trainer.step(make_batch(seed=3, version=3))
    assert result.metrics["loss/grad_norm"] > 0
    moved = weights_of(trainer)
    assert not any(torch.equal(policy[f"master/{n}"], w) for n, w in moved.items())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_critic_learns_from_a_batch_that_ties(model: Path, tmp_path: Path, backbone: str) -> None:
    """It foretold zero, everything came to one: that is news for the critic, though nothing for the policy."""
    trainer = _with_critic(model, tmp_path / "w", backbone)
    critic = {n: t.clone() for n, t in trainer.critic.state().items()}
    metrics = trainer.step(_tied(make_batch())).metrics
    assert metrics["loss/skipped_minibatches"] == 0
    assert metrics["critic/loss"] > 0
    assert not torch.equal(critic["master/head.weight"], trainer.critic.state()["master/head.weight"])


def _interrupt_after(trainer: Trainer, calls: int, owner: Any, name: str) -> Callable[..., Any]:
    """Interrupt during the call of that number."""
    original, made = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(name)
        if len(made) == calls:
            trainer.interrupted.set()
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return original


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("call", [1, 2])
def test_a_step_interrupted_while_it_evaluates_values_leaves_everything_as_it_was(
    model: Path, tmp_path: Path, backbone: str, call: int
) -> None:
    trainer = _with_critic(model, tmp_path / "w", backbone)
    whole = _with_critic(model, tmp_path / "v", backbone)
    before = _everything(trainer)
    original = _interrupt_after(trainer, call, trainer.critic, "values")
    result = trainer.step(make_batch())
    assert (result.version, trainer.version, result.trained) == (0, 0, [])
    assert result.advantages == [[None] * 3] * 4
    assert same_weights(before, _everything(trainer))
    trainer.interrupted.clear()
    trainer.critic.values = original
    assert trainer.step(make_batch()).trained == whole.step(make_batch()).trained
    assert same_weights(_everything(trainer), _everything(whole))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("where", ["credit for KL", "proximal", "between minibatches", "inside the second"])
def test_an_interrupted_step_keeps_policy_and_critic_at_the_same_minibatch(
    model: Path, tmp_path: Path, backbone: str, where: str
) -> None:
    """And nothing of a gradient that was half added up: what follows is what would have followed."""
    algorithm = {**CRITIC, "kl_coefficient": 0.1, "kl_in": "reward"}
    critic = {"backbone": backbone, "learning_rate": 3e-3}
    cut, short = (
        make_trainer(model, tmp_path / n, algorithm=algorithm, critic=critic, trainer={"token_budget": 30})
        for n in "ab"
    )
    credits = cut._credits(make_batch())
    minibatches = cut._minibatches(make_batch(), credits)
    assert min(len(m.micro_batches) for m in minibatches) > 1
    if where == "credit for KL":
        place = _interrupt_after(cut, 2, cut.reference, "logprobs")
    elif where == "proximal":
        place = _interrupt_after(cut, 1, cut.policy, "logprobs")
    elif where == "between minibatches":
        place = _interrupt_after(cut, 1, cut.critic, "step")
    else:
        place = _interrupt_after(cut, 2 + sum(len(m.micro_batches) for m in minibatches), cut.policy, "outputs")
    result = cut.step(make_batch())
    if where in ("credit for KL", "proximal"):
        assert (result.version, result.trained) == (0, [])
        return _same_afterwards(cut, short, place)
    assert (result.version, result.trained) == (1, [100, 101])
    assert result.metrics["groups/trained"] == 2.0
    assert result.metrics["critic/grad_norm"] > 0
    # The same by hand: the whole batch's credit, the first minibatch's update.
    whole = short._minibatches(make_batch(), short._credits(make_batch()))
    short._minibatches = lambda *_: whole[:1]  # type: ignore[method-assign]
    assert short.step(make_batch()).trained == [100, 101]
    del short._minibatches
    return _same_afterwards(cut, short, place)


def _same_afterwards(cut: Trainer, other: Trainer, original: Callable[..., Any]) -> None:
    assert same_weights(_everything(cut), _everything(other))
    cut.interrupted.clear()
    for trainer in (cut, other):
        trainer.step(make_batch(seed=1, version=trainer.version))
    assert same_weights(_everything(cut), _everything(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_step_after_a_checkpoint_is_the_one_that_would_have_followed(
    model: Path, tmp_path: Path, backbone: str, dtype: str
) -> None:
    """With a critic that is still warming up when it is saved, a reference, and KL."""

    def build(name: str) -> Trainer:
        return make_trainer(
            model,
            tmp_path / name,
            algorithm={**CRITIC, "kl_coefficient": 0.1, "kl_in": "reward"},
            critic={"backbone": backbone, "learning_rate": 3e-3, "warmup_steps": 2},
            trainer={"dtype": dtype},
        )

    first = build("a")
    first.step(make_batch(seed=0))
    first.save(tmp_path / "checkpoint")
    second = build("b")
    second.step(make_batch(seed=9))  # whatever it held before is gone
    second.load(tmp_path / "checkpoint")
    assert second.version == 1
    for version in (1, 2, 3):
        results = [t.step(make_batch(seed=version, version=version)) for t in (first, second)]
        assert results[0].advantages == results[1].advantages
    assert same_weights(_everything(first), _everything(second))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_in_half_precision_a_critic_and_kl_stay_finite_and_near_the_exact_step(
    model: Path, tmp_path: Path, backbone: str
) -> None:
    moved = []
    for dtype in ("bfloat16", "float32"):
        trainer = make_trainer(
            model,
            tmp_path / dtype,
            algorithm={**CRITIC, "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
            critic={"backbone": backbone, "learning_rate": 1e-3},
            trainer={"dtype": dtype, "learning_rate": 1e-5},
        )
        before = _everything(trainer)
        for version in range(4):
            metrics = trainer.step(make_batch(seed=version, version=version)).metrics
            _finite(trainer, metrics)
            assert metrics["loss/skipped_nonfinite"] == 0
        assert {p.dtype for p in trainer.model.parameters()} == {getattr(torch, dtype)}
        assert trainer.reference is not None
        assert {p.dtype for p in trainer.reference.model.parameters()} == {getattr(torch, dtype)}
        after = _everything(trainer)
        moved.append(torch.cat([(after[n] - w).flatten() for n, w in before.items() if n.startswith("master/")]))
    assert torch.cosine_similarity(*moved, dim=0) > 0.7
