"""The decoupled loss: right values, right gradients, nothing through a mask."""

import json
import math
from pathlib import Path

import pytest
import torch

from fleuve.algorithms.losses import policy_loss

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "decoupled_loss_and_packing.json"
PLAIN = {"clip_low": 0.2, "clip_high": 0.28, "cap": "mask", "cap_value": 5.0}


def _case_inputs(case: dict) -> tuple[dict, dict]:
    tensors = {
        key: torch.tensor(case[key], dtype=torch.float64)
        for key in ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages")
    }
    tensors["loss_mask"] = torch.tensor(case["loss_mask"])
    if case["kind"] == "naive":
        tensors["proximal_logprobs"] = tensors["behaviour_logprobs"]
    tensors["logprobs"].requires_grad_()
    cap = case["cap"] or {"mode": "none", "value": 5.0}
    options = {
        "denominator": float(sum(case["loss_mask"])),
        "clip_low": case["clip_low"],
        "clip_high": case["clip_high"],
        "dual_clip": case["dual_clip"],
        "cap": cap["mode"],
        "cap_value": cap["value"],
    }
    return tensors, options


def _reference_cases() -> list:
    if not CASES.exists():
        reason = "the reference cases (shared/cases) are not beside this checkout"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(c, id=f"{c['kind']}-{c['seed']}") for c in json.loads(CASES.read_text())["loss"]]


@pytest.mark.parametrize("case", _reference_cases())
def test_loss_and_gradient_agree_with_independent_implementations(case: dict) -> None:
    tensors, options = _case_inputs(case)
    loss, _ = policy_loss(**tensors, **options)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert tensors["logprobs"].grad.tolist() == pytest.approx(case["grad"], abs=1e-6)


def _random(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(tokens, generator=g, dtype=torch.float64)
    return {
        "logprobs": logprobs.requires_grad_(),
        "proximal_logprobs": (logprobs + 0.3 * torch.randn(tokens, generator=g, dtype=torch.float64)).detach(),
        "behaviour_logprobs": (logprobs + 0.6 * torch.randn(tokens, generator=g, dtype=torch.float64)).detach(),
        "advantages": torch.randn(tokens, generator=g, dtype=torch.float64),
        "loss_mask": torch.rand(tokens, generator=g) < 0.8,
    }


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    x = _random(50)
    same = x["logprobs"].detach()
    loss, sums = policy_loss(
        x["logprobs"], same, same.clone(), x["advantages"], x["loss_mask"], denominator=50.0, **PLAIN
    )
    loss.backward()
    expected = -(x["advantages"] * x["loss_mask"]) / 50.0
    assert torch.allclose(x["logprobs"].grad, expected, atol=1e-12)
    assert sums.metrics()["loss/clip_fraction"] == 0.0
    assert sums.metrics()["loss/effective_sample_size"] == pytest.approx(1.0)
    assert sums.metrics()["loss/approx_kl"] == 0.0


def test_with_the_behaviour_policy_as_proximal_it_is_ppo() -> None:
    x = _random(50, seed=1)
    loss, _ = policy_loss(
        x["logprobs"],
        x["behaviour_logprobs"],
        x["behaviour_logprobs"],
        x["advantages"],
        x["loss_mask"],
        denominator=50.0,
        **PLAIN,
    )
    ratio = (x["logprobs"] - x["behaviour_logprobs"]).exp()
    surrogate = torch.minimum(ratio * x["advantages"], ratio.clamp(0.8, 1.28) * x["advantages"])
    assert loss.item() == pytest.approx(-(surrogate * x["loss_mask"]).sum().item() / 50.0)


def test_decoupling_always_applies_the_behaviour_weight() -> None:
    """One token, r = 1, w = e: the gradient is w times the on-policy one, whatever the cap (not reached)."""
    for cap in ("mask", "clamp", "none"):
        logprobs = torch.tensor([-1.0], requires_grad=True)
        loss, _ = policy_loss(
            logprobs,
            torch.tensor([-1.0]),
            torch.tensor([-2.0]),
            torch.tensor([1.0]),
            torch.tensor([True]),
            denominator=1.0,
            clip_low=0.2,
            clip_high=0.2,
            cap=cap,  # type: ignore[arg-type]
            cap_value=5.0,
        )
        loss.backward()
        assert logprobs.grad.item() == pytest.approx(-math.e, rel=1e-6)


def test_none_caps_nothing() -> None:
    x = _random(60, seed=2)
    x["behaviour_logprobs"] = x["behaviour_logprobs"] - 3.0
    uncapped, sums = policy_loss(**x, denominator=60.0, **(PLAIN | {"cap": "none"}))
    huge, _ = policy_loss(**x, denominator=60.0, **(PLAIN | {"cap": "clamp", "cap_value": 1e9}))
    assert uncapped.item() == huge.item()
    assert sums.metrics()["loss/capped_fraction"] > 0.5


@pytest.mark.parametrize("extreme", [89.0, 1e4, float("inf"), float("nan")])
def test_a_masked_token_lets_no_inf_or_nan_through(extreme: float) -> None:
    logprobs = torch.tensor([-1.0, extreme], requires_grad=True)
    loss, sums = policy_loss(
        logprobs,
        torch.tensor([-1.0, -extreme]),
        torch.tensor([-1.0, -2 * extreme]),
        torch.tensor([1.0, extreme]),
        torch.tensor([True, False]),
        denominator=1.0,
        **PLAIN,
    )
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(v) for v in sums.metrics().values())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_unmasked_token_with_a_huge_log_ratio_stays_finite(sign: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs,
        torch.tensor([-90.0]),
        torch.tensor([-1.0]),
        torch.tensor([sign]),
        torch.tensor([True]),
        denominator=1.0,
        **PLAIN,
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert math.isfinite(logprobs.grad.item())


def test_splitting_a_minibatch_changes_neither_loss_nor_sums() -> None:
    whole = _random(64, seed=3)
    loss, sums = policy_loss(**whole, denominator=64.0, **PLAIN)
    loss.backward()
    parts = {k: v.detach().split([10, 30, 24]) for k, v in whole.items()}
    total, part_sums, grads = 0.0, None, []
    for i in range(3):
        piece = {k: v[i].clone() for k, v in parts.items()}
        piece["logprobs"].requires_grad_()
        part, s = policy_loss(**piece, denominator=64.0, **PLAIN)
        part.backward()
        grads.append(piece["logprobs"].grad)
        total += part.item()
        part_sums = s if part_sums is None else part_sums + s
    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert torch.equal(torch.cat(grads), whole["logprobs"].grad)
    assert part_sums.metrics() == pytest.approx(sums.metrics())


def test_a_call_without_tokens_reports_nothing() -> None:
    x = _random(4)
    x["loss_mask"] = torch.zeros(4, dtype=torch.bool)
    loss, sums = policy_loss(**x, denominator=1.0, **PLAIN)
    assert loss.item() == 0.0
    assert sums.metrics() == {}
