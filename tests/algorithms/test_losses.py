"""The decoupled loss: right values, right gradients, nothing through a mask."""

import json
import math
from pathlib import Path

import pytest
import torch

from fleuve.algorithms.aggregation import Totals
from fleuve.algorithms.answers import Answers
from fleuve.algorithms.losses import LossInputs, PolicyLoss

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "decoupled_loss_and_packing.json"


def tokens(mask: torch.Tensor | None = None, **given: torch.Tensor) -> LossInputs:
    """One answer's inputs, whose tokens are fresh unless `staleness` says otherwise; only those of `mask`."""
    n = len(given["logprobs"])
    inputs = LossInputs(**({"staleness": torch.zeros(n, dtype=torch.int64), "answers": Answers.of([n])} | given))
    return inputs if mask is None else inputs.select(mask)


def per_token(denominator: float) -> Totals:
    return Totals(tokens=denominator, answers=1.0)


def _case_inputs(case: dict) -> tuple[dict, PolicyLoss, Totals]:
    names = {"logprobs": "logprobs", "proximal": "proximal_logprobs", "behaviour": "behaviour_logprobs"}
    given = {ours: torch.tensor(case[theirs], dtype=torch.float64) for ours, theirs in names.items()}
    given["advantages"] = torch.tensor(case["advantages"], dtype=torch.float64)
    given["mask"] = torch.tensor(case["loss_mask"])
    if case["kind"] == "naive":
        given["proximal"] = given["behaviour"]
    given["logprobs"].requires_grad_()
    cap = case["cap"] or {"mode": "none", "value": 5.0}
    loss = PolicyLoss(
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["dual_clip"],
        cap=cap["mode"],
        cap_value=cap["value"],
    )
    return given, loss, per_token(float(sum(case["loss_mask"])))


def _reference_cases() -> list:
    if not CASES.exists():
        reason = "the reference cases (shared/cases) are not beside this checkout"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(c, id=f"{c['kind']}-{c['seed']}") for c in json.loads(CASES.read_text())["loss"]]


@pytest.mark.parametrize("case", _reference_cases())
def test_loss_and_gradient_agree_with_independent_implementations(case: dict) -> None:
    given, policy_loss, totals = _case_inputs(case)
    loss, _ = policy_loss(tokens(**given), totals)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert given["logprobs"].grad.tolist() == pytest.approx(case["grad"], abs=1e-6)


def _random(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, generator=g, dtype=torch.float64)
    return {
        "logprobs": logprobs.requires_grad_(),
        "proximal": (logprobs + 0.3 * torch.randn(count, generator=g, dtype=torch.float64)).detach(),
        "behaviour": (logprobs + 0.6 * torch.randn(count, generator=g, dtype=torch.float64)).detach(),
        "advantages": torch.randn(count, generator=g, dtype=torch.float64),
        "mask": torch.rand(count, generator=g) < 0.8,
    }


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    x = _random(50)
    same = x["logprobs"].detach()
    loss, sums = PolicyLoss()(tokens(**(x | {"proximal": same, "behaviour": same.clone()})), per_token(50.0))
    loss.backward()
    expected = -(x["advantages"] * x["mask"]) / 50.0
    assert torch.allclose(x["logprobs"].grad, expected, atol=1e-12)
    assert sums.metrics()["loss/clip_fraction"] == 0.0
    assert sums.metrics()["loss/effective_sample_size"] == pytest.approx(1.0)
    assert sums.metrics()["loss/approx_kl"] == 0.0


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sapo", "policy_gradient"])
@pytest.mark.parametrize("aggregation", ["token_mean", "answer_mean", "constant"])
def test_every_objective_s_gradient_on_policy_is_the_policy_gradient(objective: str, aggregation: str) -> None:
    """Two answers of 4 and 6 tokens, one advantage each; what differs is only what a token counts."""
    logprobs = -torch.rand(10, dtype=torch.float64)
    logprobs.requires_grad_()
    same, answers = logprobs.detach(), Answers.of([4, 6])
    advantages = answers.spread(torch.tensor([1.5, -0.5], dtype=torch.float64))
    inputs = tokens(logprobs=logprobs, proximal=same, behaviour=same, advantages=advantages, answers=answers)
    loss, _ = PolicyLoss(objective=objective, aggregation=aggregation, horizon=20.0)(inputs, Totals(10.0, 2.0))
    loss.backward()
    share = {
        "token_mean": torch.full((10,), 1 / 10),
        "answer_mean": answers.spread(torch.tensor([1 / 8, 1 / 12])),
        "constant": torch.full((10,), 1 / 40),
    }[aggregation]
    assert logprobs.grad.tolist() == pytest.approx((-share * advantages).tolist(), rel=1e-6)


def test_with_the_behaviour_policy_as_proximal_it_is_ppo() -> None:
    x = _random(50, seed=1)
    loss, _ = PolicyLoss()(tokens(**(x | {"proximal": x["behaviour"]})), per_token(50.0))
    ratio = (x["logprobs"] - x["behaviour"]).exp()
    surrogate = torch.minimum(ratio * x["advantages"], ratio.clamp(0.8, 1.28) * x["advantages"])
    assert loss.item() == pytest.approx(-(surrogate * x["mask"]).sum().item() / 50.0)


def _one(logprob: float, proximal: float, behaviour: float, advantage: float = 1.0) -> dict[str, torch.Tensor]:
    values = {"logprobs": logprob, "proximal": proximal, "behaviour": behaviour, "advantages": advantage}
    given = {name: torch.tensor([value]) for name, value in values.items()}
    given["logprobs"].requires_grad_()
    return given


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sapo", "policy_gradient"])
@pytest.mark.parametrize("cap", ["mask", "clamp", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupling_always_applies_the_behaviour_weight(objective: str, cap: str, level: str) -> None:
    """One token, r = 1, w = e: the gradient is w times the on-policy one, whatever the parts (no cap is reached)."""
    given = _one(-1.0, -1.0, -2.0)
    loss, _ = PolicyLoss(objective=objective, cap=cap, cap_level=level)(tokens(**given), per_token(1.0))
    loss.backward()
    assert given["logprobs"].grad.item() == pytest.approx(-math.e, rel=1e-6)


def test_second_moment_masking_applies_the_weight_up_to_its_limit() -> None:
    given = _one(-1.0, -1.0, -2.0)
    for limit, expected in ((1.1, -math.e), (0.9, 0.0)):
        given["logprobs"].grad = None
        loss, sums = PolicyLoss(cap="second_moment")(tokens(**given), per_token(1.0), limit)
        loss.backward()
        assert given["logprobs"].grad.item() == pytest.approx(expected, rel=1e-6)
        assert sums.metrics()["loss/capped_fraction"] == float(limit < 1.0)
    with pytest.raises(ValueError, match="limit"):
        PolicyLoss(cap="second_moment")(tokens(**given), per_token(1.0))


def test_second_moment_masking_is_by_token_whatever_the_level() -> None:
    x = {name: value for name, value in _random(40, seed=5).items() if name != "mask"}
    metrics = []
    for level in ("token", "sequence"):
        _, sums = PolicyLoss(cap="second_moment", cap_level=level)(tokens(**x), per_token(40.0), 100.0)
        metrics.append(sums.metrics())
    assert metrics[0] == metrics[1]
    assert metrics[0]["loss/capped_fraction"] == 0.0


@pytest.mark.parametrize("objective", ["cispo", "policy_gradient", "ppo"])
def test_a_token_that_the_cap_drops_may_have_a_log_probability_of_minus_infinity(objective: str) -> None:
    logprobs = torch.tensor([-1.0, -math.inf], requires_grad=True)
    other = torch.tensor([-1.0, -1.0])
    inputs = tokens(logprobs=logprobs, proximal=other, behaviour=torch.tensor([-1.0, -20.0]), advantages=torch.ones(2))
    loss, _ = PolicyLoss(objective=objective)(inputs, per_token(2.0))
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad.tolist() == [-0.5, 0.0]


def test_none_caps_nothing() -> None:
    x = _random(60, seed=2)
    x["behaviour"] = x["behaviour"] - 3.0
    uncapped, sums = PolicyLoss(cap="none")(tokens(**x), per_token(60.0))
    huge, _ = PolicyLoss(cap="clamp", cap_value=1e9)(tokens(**x), per_token(60.0))
    assert uncapped.item() == huge.item()
    assert sums.metrics()["loss/capped_fraction"] == 0.0
    _, masked = PolicyLoss(cap="mask")(tokens(**x), per_token(60.0))
    _, clamped = PolicyLoss(cap="clamp")(tokens(**x), per_token(60.0))
    assert masked.metrics()["loss/capped_fraction"] == clamped.metrics()["loss/capped_fraction"] > 0.5


@pytest.mark.parametrize("extreme", [89.0, 1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sapo", "policy_gradient"])
def test_a_masked_token_lets_no_inf_or_nan_through(extreme: float, objective: str) -> None:
    logprobs = torch.tensor([-1.0, extreme], requires_grad=True)
    inputs = tokens(
        torch.tensor([True, False]),
        logprobs=logprobs,
        proximal=torch.tensor([-1.0, -extreme]),
        behaviour=torch.tensor([-1.0, -2 * extreme]),
        advantages=torch.tensor([1.0, extreme]),
        reference=torch.tensor([-1.0, extreme]),
        entropies=torch.tensor([0.0, extreme]),
    )
    loss, sums = PolicyLoss(objective=objective, kl_coefficient=1.0, entropy_coefficient=1.0)(inputs, per_token(1.0))
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(v) for v in sums.metrics().values())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("away", [100.0, -100.0])
@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sapo", "policy_gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learnt_token_with_a_huge_log_ratio_stays_finite(
    sign: float, away: float, objective: str, dtype: torch.dtype
) -> None:
    """Both r and w, of an answer of length 1."""
    for proximal, behaviour in ((-101.0, -101.0), (-101.0, -101.0 + away), (-101.0 + away, -101.0)):
        given = {name: value.detach().to(dtype) for name, value in _one(-101.0, proximal, behaviour, sign).items()}
        given["logprobs"].requires_grad_()
        loss, sums = PolicyLoss(objective=objective, cap="none")(tokens(**given), per_token(1.0))
        loss.backward()
        assert loss.dtype == torch.float32
        assert math.isfinite(loss.item())
        assert math.isfinite(given["logprobs"].grad.item())
        assert all(math.isfinite(v) for v in sums.metrics().values())


def test_kl_in_the_loss_pulls_to_the_reference_and_the_entropy_bonus_away_from_certainty() -> None:
    given = _one(-1.0, -1.0, -1.0, advantage=0.0)
    reference = torch.tensor([-1.5])
    loss, sums = PolicyLoss(kl_coefficient=0.2, kl_estimator="k1")(tokens(**given, reference=reference), per_token(1.0))
    loss.backward()
    assert sums.metrics()["loss/kl_reference"] == pytest.approx(0.5)
    assert loss.item() == pytest.approx(0.2 * 0.5)
    assert given["logprobs"].grad.item() == pytest.approx(0.2 * 0.5)
    entropies = torch.tensor([0.7], requires_grad=True)
    loss, _ = PolicyLoss(entropy_coefficient=0.3)(tokens(**given, entropies=entropies), per_token(1.0))
    loss.backward()
    assert loss.item() == pytest.approx(-0.3 * 0.7)
    assert entropies.grad.item() == pytest.approx(-0.3)


def test_a_regulariser_without_its_inputs_is_an_error_and_not_nothing() -> None:
    given = tokens(**_one(-1.0, -1.0, -1.0))
    with pytest.raises(ValueError, match="reference"):
        PolicyLoss(kl_coefficient=0.1)(given, per_token(1.0))
    with pytest.raises(ValueError, match="entropies"):
        PolicyLoss(entropy_coefficient=0.1)(given, per_token(1.0))


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sapo", "policy_gradient"])
@pytest.mark.parametrize("aggregation", ["token_mean", "answer_mean", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_splitting_a_minibatch_changes_neither_loss_nor_sums(objective: str, aggregation: str, level: str) -> None:
    """Answers of 10, 30 and 24 tokens in one micro-batch or in three."""
    lengths = [10, 30, 24]
    whole = {name: value for name, value in _random(64, seed=3).items() if name != "mask"}
    staleness = torch.arange(64) % 20
    policy_loss = PolicyLoss(objective=objective, aggregation=aggregation, cap_level=level, horizon=30.0)
    totals = Totals(64.0, 3.0)
    loss, sums = policy_loss(tokens(**whole, staleness=staleness, answers=Answers.of(lengths)), totals)
    loss.backward()
    parts = {k: v.detach().split(lengths) for k, v in (whole | {"staleness": staleness}).items()}
    total, part_sums, grads = 0.0, None, []
    for i in range(3):
        piece = {k: v[i].clone() for k, v in parts.items()}
        piece["logprobs"].requires_grad_()
        part, s = policy_loss(tokens(**piece), totals)
        part.backward()
        grads.append(piece["logprobs"].grad)
        total += part.item()
        part_sums = s if part_sums is None else part_sums + s
    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(torch.cat(grads), whole["logprobs"].grad, atol=1e-15, rtol=1e-12)
    assert part_sums.metrics() == pytest.approx(sums.metrics())


def test_a_call_without_tokens_reports_nothing() -> None:
    x = _random(4)
    x["mask"] = torch.zeros(4, dtype=torch.bool)
    loss, sums = PolicyLoss()(tokens(**x), per_token(1.0))
    assert loss.item() == 0.0
    assert sums.metrics() == {}
