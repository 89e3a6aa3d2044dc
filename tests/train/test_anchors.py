"""What a step's updates are held to: which policy, evaluated when, at what cost, and over which tokens."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_batch, make_trainer, save_tiny_model, weights_of

from fleuve.algorithms.corrections import second_moment_limit
from fleuve.algorithms.losses import LossInputs
from fleuve.config.presets import PRESETS
from fleuve.train.anchors import find_anchors
from fleuve.train.metrics import StartOfStep
from fleuve.train.microbatch import make_micro_batches, sample_of
from fleuve.train.trainer import Trainer
from fleuve.types import Batch

VERSION = 3
LARGE_STEPS = {"learning_rate": 0.05, "eps": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batch(model: Path, tmp_path: Path) -> Batch:
    """Tokens of the versions 0 to 3, in a step that starts from version 3. Their log-probabilities are what samplers
    with slightly other weights would have recorded: some weights are within every cap, some beyond."""
    made = make_batch(seed=1, version=VERSION, groups=4, size=4)
    policy, rng = make_trainer(model, tmp_path / "sampler").policy, np.random.default_rng(0)
    for t in made.trajectories:
        (m,) = make_micro_batches([sample_of(t, np.ones(len(t.output_ids), np.bool_))], 1000)
        with torch.no_grad():
            true = policy.logprobs(m)[0].numpy()
        t.logprobs = (true + 0.5 * rng.standard_normal(len(true))).astype(np.float32)
    return made


class Watch:
    """Stands before a trainer's loss and keeps what comes by, minibatch by minibatch."""

    def __init__(self, trainer: Trainer) -> None:
        self.loss, self.trainer = trainer.loss, trainer
        self.seen: list[list[LossInputs]] = [[]]
        step = trainer.optimizer.step

        def apply(*args: Any) -> tuple[float, bool]:
            self.seen.append([])
            return step(*args)

        trainer.loss = self  # type: ignore[assignment]
        trainer.optimizer.step = apply  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, inputs: LossInputs, *args: Any) -> Any:
        self.seen[-1].append(inputs)
        return self.loss(inputs, *args)

    def of(self, minibatch: int, name: str) -> torch.Tensor:
        """One field of all tokens of one minibatch."""
        return torch.cat([getattr(inputs, name) for inputs in self.seen[minibatch]]).detach()


def _trainer(model: Path, store: Path, trainer: dict[str, object] | None = None, **algorithm: Any) -> Trainer:
    made = make_trainer(model, store, trainer={**LARGE_STEPS, **(trainer or {})}, algorithm=algorithm)
    made.version = VERSION
    return made


def _at_the_start(model: Path, store: Path, batch: Batch, minibatch: int) -> torch.Tensor:
    """The log-probabilities of the weights that the step starts from, in the order in which the loss gets them."""
    fresh = _trainer(model, store)
    with torch.no_grad():
        parts = fresh._minibatches(batch, fresh._credits(batch))[minibatch].micro_batches
        return torch.cat([fresh.policy.logprobs(m)[0] for m in parts])


@pytest.mark.parametrize("cap", ["mask", "second_moment"])
def test_recomputed_the_proximal_policy_is_the_start_of_the_step_in_every_minibatch(
    model: Path, tmp_path: Path, batch: Batch, cap: str
) -> None:
    trainer = _trainer(model, tmp_path / "a", cap=cap)
    watch = Watch(trainer)
    trainer.step(batch)
    for minibatch in (0, 1):
        assert torch.equal(
            watch.of(minibatch, "proximal"), _at_the_start(model, tmp_path / f"b{minibatch}", batch, minibatch)
        )
    assert torch.equal(watch.of(0, "proximal"), watch.of(0, "logprobs"))
    assert float((watch.of(1, "proximal") - watch.of(1, "logprobs")).abs().max()) > 0.05


def test_of_naive_ppo_it_is_who_sampled(model: Path, tmp_path: Path, batch: Batch) -> None:
    trainer = _trainer(model, tmp_path / "w", proximal="behaviour")
    watch = Watch(trainer)
    metrics = trainer.step(batch).metrics
    for minibatch in (0, 1):
        assert torch.equal(watch.of(minibatch, "proximal"), watch.of(minibatch, "behaviour"))
    assert metrics["loss/behaviour_weight_mean"] == metrics["loss/effective_sample_size"] == 1.0


def test_interpolated_it_lies_between_sampler_and_current_policy(model: Path, tmp_path: Path, batch: Batch) -> None:
    """A token of the step's own version is exactly its own proximal; of an older one, the first minibatch is exact
    too, and the second, half-way through the step, is d / (d + ½) of the way."""
    trainer = _trainer(model, tmp_path / "w", proximal="interpolate")
    watch = Watch(trainer)
    trainer.step(batch)
    for minibatch in (0, 1):
        stale = watch.of(minibatch, "staleness")
        proximal, behaviour, current = (watch.of(minibatch, n) for n in ("proximal", "behaviour", "logprobs"))
        assert 0 < int((stale == 0).sum()) < len(stale)
        assert torch.equal(proximal[stale == 0], behaviour[stale == 0])
        if minibatch == 0:
            assert torch.equal(proximal[stale > 0], current[stale > 0])
        else:
            covered = ((proximal - behaviour) / (current - behaviour))[stale > 0]
            assert covered.tolist() == pytest.approx((stale / (stale + 0.5))[stale > 0].tolist(), abs=1e-4)


@pytest.mark.parametrize("why", ["tied", "not finite"])
def test_until_the_policy_has_moved_interpolation_is_exact(model: Path, tmp_path: Path, batch: Batch, why: str) -> None:
    """Minibatches that gave no update have not moved it."""
    for group in batch.groups[:2]:
        for t in group.trajectories:
            t.reward = 1.0 if why == "tied" else t.reward
            t.logprobs = np.full_like(t.logprobs, math.nan) if why == "not finite" else t.logprobs
    trainer = _trainer(model, tmp_path / "w", proximal="interpolate", cap="none")
    watch = Watch(trainer)
    metrics = trainer.step(batch).metrics
    assert metrics["loss/skipped_minibatches"] + metrics["loss/skipped_nonfinite"] == 1.0
    inputs = next(m for m in watch.seen if m and not bool(m[0].behaviour.isnan().any()))
    stale = torch.cat([x.staleness for x in inputs]) > 0
    proximal, current = (torch.cat([getattr(x, n) for x in inputs]).detach() for n in ("proximal", "logprobs"))
    assert torch.equal(proximal[stale], current[stale])


@pytest.mark.parametrize(
    ("proximal", "cap", "first", "second"),
    [
        ("recompute", "mask", 1, 2),
        ("recompute", "second_moment", 2, 2),
        ("interpolate", "mask", 1, 1),
        ("behaviour", "mask", 1, 1),
    ],
)
def test_what_the_proximal_policy_costs_in_forward_passes(
    model: Path, tmp_path: Path, batch: Batch, proximal: str, cap: str, first: int, second: int
) -> None:
    trainer = _trainer(model, tmp_path / "w", proximal=proximal, cap=cap)
    sizes = [len(m.micro_batches) for m in trainer._minibatches(batch, trainer._credits(batch))]
    passes = []
    hidden = trainer.policy.hidden
    trainer.policy.hidden = lambda m: (passes.append(m), hidden(m))[1]  # type: ignore[method-assign,func-returns-value]
    metrics = trainer.step(batch).metrics
    assert sizes[0] > 1
    assert len(passes) == first * sizes[0] + second * sizes[1]
    assert metrics["loss/entropy"] > 0  # always measured, never at the cost of a pass


@pytest.mark.parametrize("minibatch", [0, 1])
def test_the_second_moment_s_limit_is_that_of_the_whole_minibatch(
    model: Path, tmp_path: Path, batch: Batch, minibatch: int
) -> None:
    limits, counts = [], []
    for budget in (20, 64, 10_000):
        trainer = _trainer(model, tmp_path / str(budget), {"token_budget": budget}, cap="second_moment")
        minibatches = trainer._minibatches(batch, trainer._credits(batch))
        start = StartOfStep(VERSION)
        anchors = find_anchors(minibatches, trainer.settings.algorithm, trainer.policy, None, start, lambda: False)
        limits.append(anchors[minibatch].weight_limit)
        counts.append(len(minibatches[minibatch].micro_batches))
    watch = Watch(_trainer(model, tmp_path / "s"))
    watch.trainer.step(batch)
    plain = second_moment_limit(watch.of(minibatch, "proximal") - watch.of(minibatch, "behaviour"))
    assert counts[0] > counts[1] > counts[2] == 1
    assert limits == pytest.approx([plain] * 3, rel=1e-5)
    assert 0 < plain < 3


def test_second_moment_masking_keeps_its_budget(model: Path, tmp_path: Path, batch: Batch) -> None:
    trainer = _trainer(model, tmp_path / "w", cap="second_moment", second_moment_budget=0.2)
    watch = Watch(trainer)
    metrics = trainer.step(batch).metrics
    capped = 0
    for minibatch in (0, 1):
        size = (watch.of(minibatch, "proximal") - watch.of(minibatch, "behaviour")).double().abs().sort().values
        moment = size.square().cumsum(0) / torch.arange(1, len(size) + 1)
        capped += int((moment > 0.2).sum())
    assert metrics["loss/capped_fraction"] == pytest.approx(capped / sum(len(watch.of(i, "proximal")) for i in (0, 1)))
    assert capped > 0


@pytest.mark.parametrize("tied", [slice(None), slice(0, 2), slice(2, 4)])
def test_second_moment_masking_of_a_minibatch_without_signal_is_nothing(
    model: Path, tmp_path: Path, batch: Batch, tied: slice
) -> None:
    for group in batch.groups[tied]:
        for t in group.trajectories:
            t.reward = 0.5
    result = _trainer(model, tmp_path / "w", cap="second_moment").step(batch)
    assert result.version == VERSION + 1
    assert result.metrics["loss/skipped_minibatches"] == len(batch.groups[tied]) / 2


# --- the reference --------------------------------------------------------------------------------------------------


def test_the_reference_stays_the_initial_model(model: Path, tmp_path: Path, batch: Batch) -> None:
    trainer = _trainer(model, tmp_path / "w", kl_coefficient=0.1)
    before = {n: p.clone() for n, p in trainer.reference.model.named_parameters()}
    trainer.step(batch)
    again = make_batch(seed=1, version=VERSION + 1, groups=4, size=4)
    watch = Watch(trainer)
    trainer.step(again)
    assert all(torch.equal(before[n], p) for n, p in trainer.reference.model.named_parameters())
    for minibatch in (0, 1):
        assert float((watch.of(minibatch, "reference") - watch.of(minibatch, "logprobs")).abs().max()) > 0.05


def test_another_model_may_be_the_reference(model: Path, tmp_path: Path, batch: Batch) -> None:
    other = save_tiny_model(tmp_path / "other", seed=5)
    trainer = _trainer(model, tmp_path / "w", kl_coefficient=0.1, reference=str(other))
    watch = Watch(trainer)
    trainer.step(batch)
    _, there = (weights_of(_trainer(m, tmp_path / m.name)) for m in (model, other))
    assert all(torch.equal(p, there[n]) for n, p in trainer.reference.model.named_parameters())
    assert float((watch.of(0, "reference") - watch.of(0, "logprobs")).abs().max()) > 0.1


@pytest.mark.parametrize(("coefficient", "where"), [(0.0, "loss"), (0.0, "reward"), (0.1, "reward")])
def test_without_kl_in_the_loss_no_update_asks_the_reference(
    model: Path, tmp_path: Path, batch: Batch, coefficient: float, where: str
) -> None:
    trainer = _trainer(model, tmp_path / "w", kl_coefficient=coefficient, kl_in=where)
    watch = Watch(trainer)
    trainer.step(batch)
    assert (trainer.reference is None) == (coefficient == 0)
    assert all(inputs.reference is None for m in watch.seen for inputs in m)


# --- invariant 4: micro-batching is invisible -----------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"preset {name}": {"preset": name} for name in PRESETS},
    **{
        f"{cap} by {level}": {"cap": cap, "cap_level": level, "cap_value": 1.5, "cap_low": 0.6}
        for cap in ("none", "clamp", "mask", "second_moment")
        for level in ("token", "sequence")
    },
    "larger second moment": {"cap": "second_moment", "second_moment_budget": 1.0},
    "interpolate": {"proximal": "interpolate"},
    "naive": {"proximal": "behaviour"},
    "dual clip": {"dual_clip": 2.0, "clip_low": 0.01, "clip_high": 0.01},
    "kl k1": {"kl_coefficient": 0.5, "kl_estimator": "k1"},
    "kl k3, mean over answers": {"kl_coefficient": 0.5, "aggregation": "answer_mean"},
    "kl in the reward": {"preset": "reinforce_pp", "kl_coefficient": 0.5},
    "kl in the reward of a group": {"kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
    "entropy": {"entropy_coefficient": 0.5, "aggregation": "constant", "horizon": 7},
    "critic, kl, entropy": {"preset": "ppo", "kl_coefficient": 0.5, "entropy_coefficient": 0.5, "gae_lambda": 0.9},
    "overlong": {"preset": "dapo", "overlong_buffer": 0.9, "truncated": "exclude", "reward_scale": 3.0},
}


def _in_double(trainer: Trainer, critic_seed: int = 3) -> Trainer:
    """fp64 but for norms and the critic's head, which compute in fp32; the head is not zero."""
    trainer.model.double()
    if trainer.reference is not None:
        trainer.reference.model.double()
    if trainer.critic is not None:
        if trainer.critic.model.backbone is not None:
            trainer.critic.model.backbone.double()
        generator = torch.Generator().manual_seed(critic_seed)
        with torch.no_grad():
            trainer.critic.model.head.weight.normal_(std=0.2, generator=generator)
    return trainer


EVERY_TIME = {
    *("preset grpo", "preset dapo", "preset gspo", "preset ppo", "mask by token", "clamp by sequence", "interpolate"),
    *("second_moment by token", "naive", "kl k3, mean over answers", "critic, kl, entropy", "overlong"),
}
"""Of the variants; all of them take minutes."""


@pytest.mark.parametrize(
    ("variant", "backbone"),
    [
        pytest.param(name, backbone, marks=() if name in EVERY_TIME else pytest.mark.slow)
        for backbone, names in {"own": VARIANTS, "shared": ("preset ppo", "critic, kl, entropy")}.items()
        for name in names
    ],
)
def test_a_step_is_the_same_for_every_packing(
    model: Path, tmp_path: Path, batch: Batch, variant: str, backbone: str
) -> None:
    """Two minibatches, so that clips, caps and interpolation are at work in the second. `overdue = mask` leaves
    answers without any token, and gives some minibatches fewer tokens than they have sampled."""
    algorithm = VARIANTS[variant]
    with_critic = algorithm.get("preset") == "ppo"
    found = []
    for budget, chunk in ((24, 16), (50, 5), (10_000, 10_000)):
        trainer = _in_double(
            make_trainer(
                model,
                tmp_path / str(budget),
                trainer={**LARGE_STEPS, "token_budget": budget, "logprob_chunk": chunk},
                control={"max_staleness": 1, "overdue": "mask"},
                critic={"backbone": backbone, "learning_rate": 0.01, "coefficient": 0.5},
                rollout={"max_new_tokens": 16},
                algorithm=algorithm,
            )
        )
        trainer.version = VERSION
        before = weights_of(trainer)
        metrics = trainer.step(batch).metrics
        critic = trainer.critic.optimizer.masters if trainer.critic else {}
        found.append(weights_of(trainer) | {f"critic/{n}": m.detach().clone() for n, m in critic.items()})
    moved = max(float((found[0][n] - w).abs().max()) for n, w in before.items())
    assert moved > 1e-3, metrics
    tolerance = 1e-5 if with_critic else 1e-9
    for other in found[1:]:
        for name, weight in found[0].items():
            assert torch.allclose(other[name], weight, atol=tolerance, rtol=0), name
