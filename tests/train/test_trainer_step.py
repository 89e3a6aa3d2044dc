"""One training step, against the same step written out plainly, and what it does with the odd cases."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_batch, make_trainer, same_weights, save_tiny_model, weights_of
from transformers import AutoModelForCausalLM

from fleuve.algorithms.advantages import group_relative
from fleuve.train.anchors import find_anchors
from fleuve.train.metrics import StartOfStep
from fleuve.train.microbatch import make_micro_batches, sample_of
from fleuve.train.trainer import Trainer, split_evenly
from fleuve.types import Batch, Trajectory

EPS = 0.1
"""AdamW's: large, so that a rounding error in a tiny gradient stays one in the weights."""
LEARNING_RATE = 0.2
"""Large, so that the second minibatch meets weights that have moved far from the proximal ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _in_double(trainer: Trainer) -> Trainer:
    """fp64 where the model's own code does not fall back to fp32 (norms), so that order of summation does not show."""
    trainer.model.double()
    return trainer


def _plain_logprobs(model: torch.nn.Module, t: Trajectory, temperature: float) -> torch.Tensor:
    """One answer alone through transformers' own forward."""
    tokens = torch.from_numpy(np.concatenate([t.prompt_ids, t.output_ids])).long()
    logprobs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
    rows = torch.arange(len(t.prompt_ids) - 1, len(tokens) - 1)
    return logprobs[rows, tokens[rows + 1]]


def _plain_step(
    path: Path, batch: Batch, naive: bool, minibatches: int, oldest: int = -1, max_norm: float = 1.0
) -> torch.nn.Module:
    """Design, section 4.4, written out answer by answer; the proximal policy is computed first, for everything."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    with torch.no_grad():
        start = {id(t): _plain_logprobs(model, t, 0.8) for g in batch.groups for t in g.trajectories}
    for part in split_evenly(len(batch.groups), minibatches):
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for group in batch.groups[part]:
            advantages = group_relative([t.reward for t in group.trajectories])
            for t, advantage in zip(group.trajectories, advantages, strict=True):
                if advantage is None:
                    continue
                behaviour = torch.from_numpy(t.logprobs.copy()).double()
                proximal = behaviour if naive else start[id(t)]
                ratio = (_plain_logprobs(model, t, 0.8) - proximal).exp()
                weight = (proximal - behaviour).exp()
                term = weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                mask = torch.from_numpy(t.loss_mask & (t.versions >= oldest))
                total = total - torch.where(mask & (weight <= 5.0), term, 0.0).sum()
                tokens += int(mask.sum())
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        adamw.step()
        adamw.zero_grad()
    return model


def _assert_close(trainer: Trainer, reference: torch.nn.Module, tolerance: float = 2e-6) -> None:
    expected = dict(reference.named_parameters())
    for name, weight in weights_of(trainer).items():
        assert torch.allclose(weight, expected[name], atol=tolerance, rtol=0), name


@pytest.mark.parametrize("proximal", ["recompute", "behaviour"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_is_the_design_s_step_written_out_plainly(
    model: Path, tmp_path: Path, proximal: str, minibatches: int
) -> None:
    batch = make_batch(seed=1)
    batch.groups[0].trajectories[1].reward = None
    trainer = _in_double(
        make_trainer(
            model,
            tmp_path / "w",
            trainer={"minibatches": minibatches, "eps": EPS, "learning_rate": LEARNING_RATE, "max_grad_norm": 0.1},
            rollout={"temperature": 0.8},
            algorithm={"proximal": proximal},
        )
    )
    result = trainer.step(batch)
    _assert_close(trainer, _plain_step(model, batch, proximal == "behaviour", minibatches, max_norm=0.1))
    assert result.version == trainer.version == 1
    assert result.trained == [g.id for g in batch.groups]
    if minibatches == 2 and proximal == "recompute":
        assert result.metrics["loss/clip_fraction"] > 0.05  # the clip is centred on weights that are gone by then
    assert result.metrics["loss/grad_norm"] > 0.1  # the clipping of the norm was at work too


def test_overdue_tokens_get_no_gradient_and_do_not_count(model: Path, tmp_path: Path) -> None:
    batch = make_batch(seed=2, version=3)
    trainer = _in_double(
        make_trainer(
            model,
            tmp_path / "w",
            rollout={"temperature": 0.8},
            control={"max_staleness": 1, "overdue": "mask"},
            trainer={"eps": EPS, "learning_rate": LEARNING_RATE},
        )
    )
    trainer.version = 3
    result = trainer.step(batch)
    _assert_close(trainer, _plain_step(model, batch, naive=False, minibatches=2, oldest=2))
    versions = np.concatenate([t.versions[t.loss_mask] for t in batch.trajectories])
    assert result.metrics["staleness/overdue_fraction"] == pytest.approx((versions < 2).mean())
    assert result.metrics["staleness/max"] == 3.0


def _gradient(trainer: Trainer, batch: Batch) -> dict[str, torch.Tensor]:
    (minibatch, *_) = trainer._minibatches(batch, trainer._credits(batch))
    start = StartOfStep(trainer.version)
    algorithm, policy = trainer.settings.algorithm, trainer.policy
    (anchors,) = find_anchors([minibatch], algorithm, policy, trainer.reference, start, lambda: False)
    trainer._accumulate(minibatch, anchors, 0.0, None)
    return {name: m.grad.clone() for name, m in trainer.optimizer.masters.items()}


def test_the_gradient_is_the_same_for_every_packing(model: Path, tmp_path: Path) -> None:
    batch = make_batch(seed=3, groups=6)
    gradients = []
    for budget, chunk in ((20, 16), (45, 3), (10_000, 10_000)):
        trainer = make_trainer(
            model,
            tmp_path / str(budget),
            trainer={"token_budget": budget, "logprob_chunk": chunk, "minibatches": 1},
            control={"batch_size": 6},
        )
        gradients.append(_gradient(_in_double(trainer), batch))
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert torch.allclose(other[name], gradient, atol=1e-12, rtol=1e-9), name


def test_the_order_of_answers_within_a_minibatch_does_not_matter(model: Path, tmp_path: Path) -> None:
    batch = make_batch(seed=3)
    turned = Batch(version=0, groups=batch.groups[::-1])
    a, b = (_in_double(make_trainer(model, tmp_path / n, trainer={"minibatches": 1})) for n in "ab")
    ga, gb = _gradient(a, batch), _gradient(b, turned)
    assert all(torch.allclose(ga[n], gb[n], atol=1e-12, rtol=1e-9) for n in ga)


def test_an_excluded_answer_is_as_if_it_had_never_been(model: Path, tmp_path: Path) -> None:
    batch = make_batch(seed=4)
    without = copy.deepcopy(batch)
    for group in batch.groups:
        group.trajectories[1].reward = None
    for group in without.groups:
        del group.trajectories[1]
    a, b = make_trainer(model, tmp_path / "a"), make_trainer(model, tmp_path / "b")
    ra, rb = a.step(batch), b.step(without)
    assert same_weights(weights_of(a), weights_of(b))
    assert [x[1] for x in ra.advantages] == [None] * 4
    differ = {"time/credit", "time/proximal", "time/update", "advantage/rejected_fraction"}
    assert {k: v for k, v in ra.metrics.items() if k not in differ} == {
        k: v for k, v in rb.metrics.items() if k not in differ
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_state_and_batch_give_the_same_weights_bit_for_bit(model: Path, tmp_path: Path, dtype: str) -> None:
    a, b = (make_trainer(model, tmp_path / n, trainer={"dtype": dtype}) for n in "ab")
    for version in range(2):
        for trainer in (a, b):
            trainer.step(make_batch(seed=version, version=version))
    assert same_weights(weights_of(a), weights_of(b))


def _tie(batch: Batch, groups: slice) -> Batch:
    for group in batch.groups[groups]:
        for t in group.trajectories:
            t.reward = 1.0
    return batch


def test_a_step_in_which_all_rewards_tie_changes_nothing_but_the_version(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    trainer.step(make_batch(seed=0))
    weights, state = weights_of(trainer), {k: v.clone() for k, v in trainer.optimizer.state().items()}
    result = trainer.step(_tie(make_batch(seed=1, version=1), slice(None)))
    assert result.version == 2
    assert result.trained == [100, 101, 102, 103]
    assert result.metrics["loss/skipped_minibatches"] == 2.0
    assert same_weights(weights_of(trainer), weights)
    assert same_weights(trainer.optimizer.state(), state)
    assert not any(math.isnan(v) for v in result.metrics.values())


NOT_MEASURED_WITHOUT_SIGNAL = {  # no answer went through the model, and no value would be true
    "loss/entropy",
    "loss/clip_fraction",
    "loss/clip_high_fraction",
    "loss/clip_low_fraction",
    "loss/capped_fraction",
    "loss/behaviour_weight_mean",
    "loss/behaviour_weight_max",
    "loss/effective_sample_size",
    "loss/approx_kl",
    "loss/kl_behaviour_proximal",
    "loss/kl_behaviour_current",
    "mismatch/logprob_abs_mean",
}


def test_a_step_without_signal_reports_what_every_step_reports(model: Path, tmp_path: Path) -> None:
    """Except for means over tokens of which there are none; that no update was made is a loss and a gradient of 0."""
    trainer = make_trainer(model, tmp_path / "w")
    plain = trainer.step(make_batch(seed=0)).metrics
    skipped = trainer.step(_tie(make_batch(seed=1, version=1), slice(None))).metrics
    lost = plain.keys() - skipped.keys()
    assert {name for name in lost if not name.startswith("by_staleness/")} == NOT_MEASURED_WITHOUT_SIGNAL
    assert not skipped.keys() - plain.keys()
    assert (skipped["loss/policy"], skipped["loss/grad_norm"]) == (0.0, 0.0)


def test_a_minibatch_without_signal_is_skipped_and_the_other_trained(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    result = trainer.step(_tie(make_batch(seed=0), slice(0, 2)))
    assert result.metrics["loss/skipped_minibatches"] == 1.0
    assert result.metrics["loss/grad_norm"] > 0
    assert result.metrics["loss/behaviour_weight_mean"] > 0
    assert float(trainer.optimizer.state()["step/model.norm.weight"]) == 1.0


@pytest.mark.parametrize("algorithm", [{}, {"preset": "m2po", "second_moment_budget": 1e-9}])
def test_where_every_token_is_capped_momentum_does_not_move_the_weights(
    model: Path, tmp_path: Path, algorithm: dict[str, object]
) -> None:
    trainer = make_trainer(model, tmp_path / "w", algorithm=algorithm)
    first = make_batch(seed=0)
    for t in first.trajectories:  # on policy: w is about 1, and nothing is capped
        t.logprobs = evaluated(trainer, t)
    trainer.step(first)
    assert float(trainer.optimizer.state()["step/model.norm.weight"]) == 2.0
    before = weights_of(trainer)
    batch = make_batch(seed=1, version=1)
    for t in batch.trajectories:
        t.logprobs -= 15.0
    metrics = trainer.step(batch).metrics
    assert metrics["loss/capped_fraction"] == 1.0
    assert metrics["loss/grad_norm"] == 0.0
    assert (metrics["loss/skipped_minibatches"], metrics["loss/skipped_nonfinite"]) == (2.0, 0.0)
    assert same_weights(before, weights_of(trainer))


def evaluated(trainer: Trainer, t: Trajectory) -> np.ndarray:
    """The trainer's own log-probabilities of an answer, `[output tokens]`."""
    everything = np.ones(len(t.output_ids), dtype=bool)
    (m,) = make_micro_batches([sample_of(t, everything)], 64)
    with torch.no_grad():
        return trainer.policy.logprobs(m)[0].numpy()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("cap", ["mask", "none"])
def test_numbers_that_are_not_finite_never_reach_the_weights(model: Path, tmp_path: Path, bad: float, cap: str) -> None:
    """A token whose weight is NaN is masked as one beyond the cap is; without a cap it poisons its minibatch alone. An
    infinite log-ratio is clamped."""
    trainer = make_trainer(model, tmp_path / "w", algorithm={"cap": cap})
    poisons = math.isnan(bad) and cap == "none"
    batch = make_batch(seed=0)
    answer = batch.groups[0].trajectories[0]
    answer.loss_mask[:] = True
    answer.logprobs[0] = bad
    result = trainer.step(batch)
    assert result.metrics["loss/skipped_nonfinite"] == (1.0 if poisons else 0.0)
    assert float(trainer.optimizer.state()["step/model.norm.weight"]) == (1.0 if poisons else 2.0)
    assert all(torch.isfinite(w).all() for w in weights_of(trainer).values())


def test_a_masked_token_may_hold_anything(model: Path, tmp_path: Path) -> None:
    batch = make_batch(seed=0)
    spoilt = copy.deepcopy(batch)
    for t in spoilt.trajectories:
        t.logprobs[~t.loss_mask] = math.nan
    a, b = make_trainer(model, tmp_path / "a"), make_trainer(model, tmp_path / "b")
    a.step(batch)
    b.step(spoilt)
    assert same_weights(weights_of(a), weights_of(b))


def test_recorded_log_probabilities_weigh_the_update(model: Path, tmp_path: Path) -> None:
    """By default, and not only when some other option is set."""
    a, b = (_in_double(make_trainer(model, tmp_path / n, trainer={"minibatches": 1})) for n in "ab")
    batch = make_batch(seed=5)
    shifted = copy.deepcopy(batch)
    for t in shifted.trajectories:
        t.logprobs += 3.0  # w below any cap
    for t in batch.trajectories:
        t.logprobs += 2.0
    ga, gb = _gradient(a, batch), _gradient(b, shifted)
    assert all(torch.allclose(ga[n], gb[n] * math.e, rtol=1e-4, atol=1e-6) for n in ga)
    assert max(float(g.abs().max()) for g in ga.values()) > 1e-3


def test_metrics_of_the_batch(model: Path, tmp_path: Path) -> None:
    batch = make_batch(seed=6, version=2)
    trainer = make_trainer(model, tmp_path / "w", control={"max_staleness": 1})
    trainer.version = 2
    metrics = trainer.step(batch).metrics
    answers = batch.trajectories
    assert metrics["reward/mean"] == pytest.approx(np.mean([t.reward for t in answers]))
    assert metrics["reward/solved"] == pytest.approx(np.mean([t.reward > 0.5 for t in answers]))
    assert metrics["response/length_max"] == max(len(t.output_ids) for t in answers)
    assert metrics["response/truncated"] == pytest.approx(1 / 3)
    assert metrics["tokens/trained"] == sum(len(t.prompt_ids) + len(t.output_ids) for t in answers)
    assert metrics["groups/trained"] == 4.0
    assert metrics["loss/learning_rate"] == 1e-3
    assert 0 < metrics["loss/effective_sample_size"] <= 1


def test_no_mismatch_when_the_log_probabilities_are_the_trainer_s_own(model: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    batch = make_batch(seed=7)
    with torch.no_grad():
        for t in batch.trajectories:
            t.logprobs = _plain_logprobs(reference, t, 0.8).numpy()
            t.loss_mask[:] = True
    trainer = make_trainer(model, tmp_path / "w", rollout={"temperature": 0.8}, trainer={"minibatches": 1})
    metrics = trainer.step(batch).metrics
    assert metrics["mismatch/logprob_abs_mean"] < 1e-5
    assert metrics["loss/behaviour_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss/clip_fraction"] == 0.0


def test_warm_up_raises_the_learning_rate_step_by_step(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w", trainer={"warmup_steps": 4, "learning_rate": 1e-3})
    rates = [trainer.step(make_batch(version=v)).metrics["loss/learning_rate"] for v in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_a_batch_for_another_version_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the batch is for version 3, the trainer holds version 0"):
        make_trainer(model, tmp_path / "w").step(make_batch(version=3))


def test_an_answer_over_the_token_budget_is_named(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w", trainer={"token_budget": 10})
    with pytest.raises(ValueError, match="more than the token budget of 10"):
        trainer.step(make_batch())


def test_an_interrupted_step_before_its_first_update_makes_no_version(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w")
    before = weights_of(trainer)
    trainer.interrupted.set()
    result = trainer.step(make_batch())
    assert (result.version, result.trained) == (0, [])
    assert same_weights(weights_of(trainer), before)
    trainer.interrupted.clear()
    assert trainer.step(make_batch()).version == 1


def test_an_interrupted_step_keeps_the_minibatches_it_has_done(model: Path, tmp_path: Path) -> None:
    whole = make_trainer(model, tmp_path / "a", trainer={"minibatches": 1}, control={"batch_size": 2})
    whole.step(Batch(version=0, groups=make_batch().groups[:2]))
    cut = make_trainer(model, tmp_path / "b")
    step = cut.optimizer.step

    def then_interrupt(*args: float, **kwargs: float) -> tuple[float, bool]:
        cut.interrupted.set()
        return step(*args, **kwargs)

    cut.optimizer.step = then_interrupt  # type: ignore[method-assign]
    result = cut.step(make_batch())
    assert (result.version, result.trained) == (1, [100, 101])
    assert result.metrics["groups/trained"] == 2.0
    assert same_weights(weights_of(cut), weights_of(whole))


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(model: Path, tmp_path: Path) -> None:
    """Updates far below bf16's resolution add up in the masters."""
    trainer = make_trainer(model, tmp_path / "w", trainer={"dtype": "bfloat16", "learning_rate": 1e-5})
    exact = make_trainer(model, tmp_path / "x", trainer={"learning_rate": 1e-5})
    before = weights_of(trainer)
    for version in range(3):
        trainer.step(make_batch(seed=version, version=version))
        exact.step(make_batch(seed=version, version=version))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in trainer.model.buffers()} == {torch.float32}
    moved = torch.cat([(w - before[n]).flatten() for n, w in weights_of(trainer).items()])
    wanted = torch.cat([(w - before[n]).flatten() for n, w in weights_of(exact).items()])
    assert torch.cosine_similarity(moved, wanted, dim=0) > 0.85
    assert moved.abs().max() < 1e-4
    for name, parameter in trainer.optimizer.parameters.items():
        assert torch.equal(parameter.detach(), weights_of(trainer)[name].bfloat16())
        assert parameter.grad is None


def test_training_raises_the_probability_of_rewarded_tokens(model: Path, tmp_path: Path) -> None:
    """Reward answers for one token: the policy comes to prefer it."""
    trainer = make_trainer(model, tmp_path / "w", trainer={"learning_rate": 3e-3})
    favourite = 7
    prompt = np.array([3, 4, 5], dtype=np.int32)

    def probability() -> float:
        with torch.no_grad():
            answer = Trajectory(
                prompt_ids=prompt,
                output_ids=np.array([favourite], dtype=np.int32),
                logprobs=np.zeros(1, dtype=np.float32),
                versions=np.zeros(1, dtype=np.int32),
                loss_mask=np.ones(1, dtype=bool),
                finish_reason="stop",
            )
            (m,) = make_micro_batches([sample_of(answer, answer.loss_mask)], 64)
            return float(trainer.policy.logprobs(m)[0].exp())

    before = probability()
    for version in range(8):
        batch = make_batch(seed=version, version=version, size=6, oldest=version)
        for group in batch.groups:
            for t in group.trajectories:
                t.prompt_ids = prompt
                t.output_ids = t.output_ids[:1].copy()
                t.logprobs, t.versions = t.logprobs[:1] - 1.0, t.versions[:1]
                t.loss_mask = np.ones(1, dtype=bool)
            group.trajectories[0].output_ids[0] = favourite
            for t in group.trajectories:
                t.reward = float(t.output_ids[0] == favourite)
        trainer.step(batch)
    assert probability() > before + 0.2
