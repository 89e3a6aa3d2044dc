"""Loss, gradient, advantages and returns as independent, published implementations compute them, to 1e-6.

No value is thought to be wrong. How the reference's names read here:

- its `seq-mean-token-sum-norm` divides the sum over all tokens by answers · horizon: `constant`, with no other factor;
- its GSPO has one advantage an answer, where the token-wise form and the sequence form are one.
"""

import json
from pathlib import Path

import pytest
import torch

from fleuve.algorithms.advantages import gae, group_relative, leave_one_out, whiten
from fleuve.algorithms.aggregation import Totals, answer_mean, constant, token_mean
from fleuve.algorithms.answers import Answers
from fleuve.algorithms.objectives import cispo, gspo, ppo, sapo
from fleuve.algorithms.ratios import bounded
from fleuve.algorithms.shaping import token_rewards

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "advantages_and_losses.json"
PER_ANSWER = {
    "grpo": group_relative,
    "dr_grpo": lambda rewards: group_relative(rewards, normalise=False),
    "rloo": leave_one_out,
}
OBJECTIVES = {"gspo": gspo, "cispo": cispo, "sapo": sapo}


def _cases(section: str, kinds: set[str] | None = None) -> list:
    if not CASES.exists():
        reason = "the reference cases (shared/cases) are not beside this checkout"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    cases = [c for c in json.loads(CASES.read_text())[section] if kinds is None or c["kind"] in kinds]
    return [pytest.param(c, id=f"{c['kind']}-{c['seed']}") for c in cases]


def _pack(rows: list[list[float]], lengths: list[int]) -> torch.Tensor:
    return torch.tensor([x for row, n in zip(rows, lengths, strict=True) for x in row[:n]], dtype=torch.float64)


@pytest.mark.skipif(not CASES.exists(), reason="the reference cases (shared/cases) are not beside this checkout")
def test_every_case_is_compared() -> None:
    cases = json.loads(CASES.read_text())
    assert {c["kind"] for c in cases["advantages"]} == {"gae", *PER_ANSWER}
    assert {c["kind"].split("_")[0] for c in cases["losses"]} == {"ppo", *OBJECTIVES}
    assert len(_cases("advantages", {"gae"})) + len(_cases("advantages", set(PER_ANSWER))) == len(cases["advantages"])


@pytest.mark.parametrize("case", _cases("advantages", set(PER_ANSWER)))
def test_advantages_of_a_group(case: dict) -> None:
    computed = []
    for group in sorted(set(case["groups"])):
        members = [r for r, g in zip(case["rewards"], case["groups"], strict=True) if g == group]
        computed += PER_ANSWER[case["kind"]](members)
    assert case["groups"] == sorted(case["groups"])
    assert computed == pytest.approx(case["advantage_per_answer"], abs=1e-6)


@pytest.mark.parametrize("case", _cases("advantages", {"gae"}))
def test_advantages_and_returns_with_a_critic(case: dict) -> None:
    lengths = case["lengths"]
    pairs = []
    for reward, values, n in zip(case["rewards"], case["values"], lengths, strict=True):
        spread = token_rewards(reward, torch.zeros(n, dtype=torch.float64), 0.0)
        pairs.append(gae(spread, torch.tensor(values[:n], dtype=torch.float64), case["gamma"], case["lam"]))
    advantages = torch.cat(whiten([a for a, _ in pairs]))
    returns = torch.cat([r for _, r in pairs])
    assert advantages.tolist() == pytest.approx(_pack(case["advantages"], lengths).tolist(), abs=1e-6)
    assert returns.tolist() == pytest.approx(_pack(case["returns"], lengths).tolist(), abs=1e-6)


@pytest.mark.parametrize("case", _cases("losses"))
def test_loss_and_gradient(case: dict) -> None:
    lengths = case["lengths"]
    answers, totals = Answers.of(lengths), Totals(tokens=sum(lengths), answers=len(lengths))
    logprobs = _pack(case["logprobs"], lengths).requires_grad_()
    log_ratio = bounded(logprobs - _pack(case["old_logprobs"], lengths))
    options = {key: case[key] for key in ("tau_pos", "tau_neg") if key in case}
    surrogate = OBJECTIVES.get(case["kind"], ppo)(
        logprobs,
        log_ratio,
        _pack(case["advantages"], lengths),
        answers,
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        **options,
    )
    if case["aggregation"] == "token-mean":
        factor = token_mean(answers, totals, dtype=torch.float64)
    elif case["aggregation"] == "seq-mean-token-mean":
        factor = answer_mean(answers, totals, dtype=torch.float64)
    else:
        assert case["aggregation"] == "seq-mean-token-sum-norm"
        factor = constant(answers, totals, horizon=case["horizon"], dtype=torch.float64)

    loss = -(surrogate.value * factor).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx(_pack(case["grad"], lengths).tolist(), abs=1e-6)
