"""What each surrogate maximises: its value, its gradient, and which tokens its bounds touch."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.answers import Answers
from fleuve.algorithms.objectives import Surrogate, cispo, gspo, policy_gradient, ppo, sapo
from fleuve.algorithms.ratios import bounded

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
ALL = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "sapo": sapo, "policy_gradient": policy_gradient}
every_objective = pytest.mark.parametrize("objective", ALL.values(), ids=ALL.keys())

lengths = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def _evaluate(
    objective: Callable[..., Surrogate],
    log_ratio: list[float],
    advantages: list[float],
    answers: Answers | None = None,
    dtype: torch.dtype = torch.float64,
    **options: float | None,
) -> tuple[Surrogate, list[float]]:
    """The surrogate at π_prox = e^−1 everywhere, and the gradient of the sum of its values by log π_θ."""
    proximal = torch.full((len(log_ratio),), -1.0, dtype=dtype)
    logprobs = (proximal + torch.tensor(log_ratio, dtype=dtype)).requires_grad_()
    answers = answers or Answers.of([1] * len(log_ratio))
    surrogate = objective(
        logprobs, bounded(logprobs - proximal), torch.tensor(advantages, dtype=dtype), answers, **(CLIP | options)
    )
    surrogate.value.sum().backward()
    return surrogate, logprobs.grad.tolist()


@every_objective
@given(lengths=lengths, data=st.data())
def test_on_policy_every_gradient_is_the_policy_gradient(
    objective: Callable[..., Surrogate], lengths: list[int], data: st.DataObject
) -> None:
    """At r = 1 nothing is clipped and each token's gradient is A, even where A differs within an answer."""
    tokens = sum(lengths)
    advantages = data.draw(st.lists(st.floats(-3, 3), min_size=tokens, max_size=tokens))
    surrogate, grad = _evaluate(objective, [0.0] * tokens, advantages, Answers.of(lengths))
    assert grad == pytest.approx(advantages, abs=1e-12)
    assert not surrogate.clipped_high.any()
    assert not surrogate.clipped_low.any()


RATIOS = [math.log(r) for r in (0.5, 0.9, 1.2, 1.5)]


def test_ppo_cuts_the_gradient_where_the_step_already_went_the_wanted_way() -> None:
    up, grad = _evaluate(ppo, RATIOS, [1.0] * 4)
    assert up.value.tolist() == pytest.approx([0.5, 0.9, 1.2, 1.28])
    assert grad == pytest.approx([0.5, 0.9, 1.2, 0.0])
    assert (up.clipped_high.tolist(), up.clipped_low.tolist()) == ([False, False, False, True], [False] * 4)
    down, grad = _evaluate(ppo, RATIOS, [-1.0] * 4)
    assert down.value.tolist() == pytest.approx([-0.8, -0.9, -1.2, -1.5])
    assert grad == pytest.approx([0.0, -0.9, -1.2, -1.5])
    assert (down.clipped_high.tolist(), down.clipped_low.tolist()) == ([False] * 4, [True, False, False, False])


@given(
    st.lists(st.tuples(st.floats(-4, 4), st.floats(-3, 3)), min_size=1, max_size=8),
    st.sampled_from([None, 3.0]),
    st.sampled_from([ppo, gspo]),
)
def test_clipped_are_exactly_the_tokens_with_an_advantage_and_no_gradient(
    tokens: list[tuple[float, float]], dual_clip: float | None, objective: Callable[..., Surrogate]
) -> None:
    log_ratio, advantages = zip(*tokens, strict=True)
    advantages = tuple(a if abs(a) > 1e-3 else 0.0 for a in advantages)
    surrogate, grad = _evaluate(objective, list(log_ratio), list(advantages), dual_clip=dual_clip)
    cut = [g == 0.0 and a != 0.0 for g, a in zip(grad, advantages, strict=True)]
    assert (surrogate.clipped_high | surrogate.clipped_low).tolist() == cut
    assert not (surrogate.clipped_high & surrogate.clipped_low).any()


def test_the_dual_clip_bounds_what_a_bad_token_can_cost() -> None:
    """r = 10, A = −1: −10 without; −3 and no gradient with c = 3. A good token is none of its business."""
    free, grad = _evaluate(ppo, [math.log(10.0)], [-1.0])
    assert (free.value.item(), grad[0]) == pytest.approx((-10.0, -10.0))
    bound, grad = _evaluate(ppo, [math.log(10.0)], [-1.0], dual_clip=3.0)
    assert (bound.value.item(), grad[0], bound.clipped_high.item()) == (-3.0, 0.0, True)
    good, _ = _evaluate(ppo, [math.log(10.0)], [1.0], dual_clip=3.0)
    assert good.value.item() == pytest.approx(1.28)


def test_gspo_has_one_ratio_an_answer_the_geometric_mean() -> None:
    """Ratios 2 and 1/2 cancel; PPO would clip the first. An answer of one token has PPO's ratio."""
    answers = Answers.of([2, 1])
    surrogate, grad = _evaluate(gspo, [math.log(2.0), math.log(0.5), math.log(1.5)], [1.0, 1.0, 1.0], answers)
    assert surrogate.value.tolist() == pytest.approx([1.0, 1.0, 1.28])
    assert grad == pytest.approx([1.0, 1.0, 0.0])
    assert surrogate.clipped_high.tolist() == [False, False, True]


@given(lengths, st.data())
def test_gspo_has_the_gradient_of_the_sequence_ratio(lengths: list[int], data: st.DataObject) -> None:
    """With one advantage an answer, the mean over the tokens is s_i A_i in value and in gradient."""
    answers, tokens = Answers.of(lengths), sum(lengths)
    log_ratio = torch.tensor(data.draw(st.lists(st.floats(-0.1, 0.1), min_size=tokens, max_size=tokens)))
    advantage = torch.tensor(data.draw(st.lists(st.floats(-3, 3), min_size=len(lengths), max_size=len(lengths))))
    ours, theirs = (log_ratio.double().requires_grad_() for _ in range(2))
    value = answers.mean(gspo(ours, ours, answers.spread(advantage.double()), answers, **CLIP).value)
    sequence = answers.mean(theirs).exp() * advantage.double()
    assert torch.allclose(value, sequence, atol=1e-12)
    value.sum().backward()
    sequence.sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_cispo_limits_the_weight_and_keeps_every_gradient() -> None:
    for sign in (1.0, -1.0):
        surrogate, grad = _evaluate(cispo, RATIOS, [sign] * 4)
        assert grad == pytest.approx([sign * w for w in (0.8, 0.9, 1.2, 1.28)])
        assert surrogate.clipped_low.tolist() == [True, False, False, False]
        assert surrogate.clipped_high.tolist() == [False, False, False, True]


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_sapo_gates_the_gradient_softly(log_ratio: float, advantage: float) -> None:
    """Its gradient is 4 p (1 − p) r A, which never leaves the policy gradient's direction and never is cut."""
    surrogate, grad = _evaluate(sapo, [log_ratio], [advantage], tau_pos=1.0, tau_neg=1.05)
    r, tau = math.exp(log_ratio), 1.0 if advantage > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (r - 1)))
    assert surrogate.value.item() == pytest.approx(4 / tau * p * advantage, abs=1e-9)
    assert grad[0] == pytest.approx(4 * p * (1 - p) * r * advantage, abs=1e-9)
    assert not (surrogate.clipped_high | surrogate.clipped_low).any()


def test_the_policy_gradient_knows_no_ratio() -> None:
    surrogate, grad = _evaluate(policy_gradient, RATIOS, [1.0, -1.0, 2.0, 0.0])
    assert surrogate.value.tolist() == pytest.approx(
        [(r - 1.0) * a for r, a in zip(RATIOS, [1.0, -1.0, 2.0, 0.0], strict=True)]
    )
    assert grad == [1.0, -1.0, 2.0, 0.0]


EXTREME = {
    # objective: (log-ratio, advantage) → (value, gradient)
    "ppo": {(100.0, 1.0): (1.28, 0.0), (-100.0, 1.0): (0.0, 0.0), (-100.0, -1.0): (-0.8, 0.0)},
    "gspo": {(100.0, 1.0): (1.28, 0.0), (-100.0, 1.0): (0.0, 0.0), (-100.0, -1.0): (-0.8, 0.0)},
    "cispo": {
        (100.0, 1.0): (1.28 * 99.0, 1.28),
        (-100.0, 1.0): (0.8 * -101.0, 0.8),
        (100.0, -1.0): (-1.28 * 99, -1.28),
    },
    "sapo": {
        (100.0, 1.0): (4.0, 0.0),
        (100.0, -1.0): (-4.0 / 1.05, 0.0),
        (-100.0, 1.0): (4.0 / (1.0 + math.e), 0.0),
    },
    "policy_gradient": {(100.0, 1.0): (99.0, 1.0), (-100.0, -1.0): (101.0, -1.0)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_objective
def test_a_log_ratio_of_a_hundred_has_a_finite_and_right_value(
    objective: Callable[..., Surrogate], dtype: torch.dtype
) -> None:
    for (log_ratio, advantage), (value, gradient) in EXTREME[objective.__name__].items():
        surrogate, grad = _evaluate(objective, [log_ratio], [advantage], dtype=dtype)
        assert surrogate.value.item() == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert grad[0] == pytest.approx(gradient, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("objective", [ppo, gspo])
def test_a_bad_token_whose_ratio_explodes_stays_finite(objective: Callable[..., Surrogate]) -> None:
    """PPO does not bound r from above where A < 0: the clamp leaves e^20, the dual clip c."""
    surrogate, grad = _evaluate(objective, [100.0], [-1.0], dtype=torch.float32)
    assert surrogate.value.item() == pytest.approx(-math.exp(20.0), rel=1e-5)
    assert math.isfinite(grad[0])
    surrogate, grad = _evaluate(objective, [100.0], [-1.0], dtype=torch.float32, dual_clip=3.0)
    assert (surrogate.value.item(), grad) == (-3.0, [0.0])


@every_objective
def test_half_precision_is_worked_in_float32(objective: Callable[..., Surrogate]) -> None:
    """bf16 has three digits, e^(1/128) needs more: the result is that of the same numbers in float64."""
    half = torch.tensor([1 / 128, 0.25, -0.25, 1 / 64], dtype=torch.bfloat16)
    advantages = torch.tensor([1.0, -1.0, 0.5, 3.0], dtype=torch.bfloat16)
    answers = Answers.of([3, 1])
    low = objective(half, half, advantages, answers, **CLIP)
    full = objective(half.double(), half.double(), advantages.double(), answers, **CLIP)
    assert low.value.dtype == torch.float32
    assert torch.allclose(low.value.double(), full.value, rtol=1e-6)
    assert low.clipped_high.equal(full.clipped_high)
    assert low.clipped_low.equal(full.clipped_low)


@every_objective
def test_no_tokens_give_no_values_and_a_graph_that_can_be_walked(objective: Callable[..., Surrogate]) -> None:
    for count in (0, 2):
        logprobs = torch.zeros(0, requires_grad=True)
        surrogate = objective(logprobs, bounded(logprobs), torch.zeros(0), Answers.of([0] * count), **CLIP)
        assert [len(x) for x in surrogate] == [0, 0, 0]
        surrogate.value.sum().backward()
        assert logprobs.grad.tolist() == []
