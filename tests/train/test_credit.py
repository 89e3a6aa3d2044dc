"""From rewards to advantages by the settings: which numbers are compared, which are left out, and where they land."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleuve.algorithms.advantages import group_relative, leave_one_out
from fleuve.config.settings import AlgorithmSettings
from fleuve.train.credit import LARGEST_REWARD, Credits, assign_credit, shaped_reward, with_credit
from fleuve.train.metrics import credit_metrics, learnt_tokens
from fleuve.train.microbatch import make_micro_batches, sample_of
from fleuve.types import Group, Prompt, Trajectory

LIMIT = 20
"""`max_new_tokens`."""
BATCH = [[1.0, 0.0, 0.0, 0.25], [0.5, 0.0, 1.0]]
LENGTHS = [[3, 1, 4, 2], [5, 2, 6]]


def answer(n: int, reward: float | None, **fields: Any) -> Trajectory:
    """`n` sampled tokens, all of version 0 and all learnt."""
    arrays = {
        "prompt_ids": np.array([3, 4], np.int32),
        "output_ids": np.arange(5, 5 + n, dtype=np.int32),
        "logprobs": np.full(n, -1.0, np.float32),
        "versions": np.zeros(n, np.int32),
        "loss_mask": np.ones(n, np.bool_),
    }
    return Trajectory(**{**arrays, "finish_reason": "stop", "reward": reward, **fields})


def group(*answers: Trajectory) -> Group:
    prompt = Prompt(id="p", input_ids=[3, 4], text="", answer="")
    return Group(id=0, prompt=prompt, trajectories=list(answers), admitted_version=0)


def groups(rewards: list[list[float | None]] = BATCH, lengths: list[list[int]] = LENGTHS) -> list[Group]:
    return [group(*[answer(n, r) for n, r in zip(*row, strict=True)]) for row in zip(lengths, rewards, strict=True)]


def credit(batch: list[Group], kl: Any = None, values: Any = None, oldest: int | None = None, **fields: Any) -> Credits:
    """`kl` and `values` are numbered by group and sample: `[[per token, ...], ...]`."""

    def per_token(given: Any) -> Callable[[int, int], torch.Tensor] | None:
        return None if given is None else lambda g, i: torch.as_tensor(given[g][i], dtype=torch.float32)

    algorithm = AlgorithmSettings(**fields)
    return assign_credit(batch, algorithm, LIMIT, lambda t: learnt_tokens(t, oldest), per_token(kl), per_token(values))


def flat(credits: Credits) -> list[float]:
    """Every learnt token's advantage."""
    return [x for row in credits for c in row if c is not None for x in c.advantages.tolist()]


def of_tokens(per_answer: list[list[float]]) -> list[float]:
    """Each answer's number at each of its tokens."""
    return [
        x for row, n in zip(per_answer, LENGTHS, strict=True) for x, k in zip(row, n, strict=True) for _ in range(k)
    ]


def _less_mean(rewards: list[float]) -> list[float]:
    return [r - sum(rewards) / len(rewards) for r in rewards]


def _less_others(rewards: list[float]) -> list[float]:
    others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
    return [r - sum(o) / len(o) for r, o in zip(rewards, others, strict=True)]


def _whiten(x: list[float]) -> list[float]:
    return ((np.array(x) - np.mean(x)) / np.sqrt(np.var(x, ddof=1) + 1e-8)).tolist()


PLAIN = {
    ("group", "none"): of_tokens([_less_mean(row) for row in BATCH]),
    ("group", "group"): of_tokens([(np.array(_less_mean(row)) / np.std(row, ddof=1)).tolist() for row in BATCH]),
    ("group", "batch"): _whiten(of_tokens([_less_mean(row) for row in BATCH])),
    ("leave_one_out", "none"): of_tokens([_less_others(row) for row in BATCH]),
    ("leave_one_out", "batch"): _whiten(of_tokens([_less_others(row) for row in BATCH])),
    ("none", "none"): of_tokens(BATCH),
    ("none", "batch"): _whiten(of_tokens(BATCH)),
}


@pytest.mark.parametrize(("baseline", "normalise"), PLAIN)
def test_each_baseline_with_each_normalisation(baseline: str, normalise: str) -> None:
    found = credit(groups(), baseline=baseline, normalise=normalise)
    assert flat(found) == pytest.approx(PLAIN[baseline, normalise], abs=1e-5)
    assert [[c.shaped_reward for c in row] for row in found] == BATCH
    assert all(c.values is None and c.returns is None for row in found for c in row)


@pytest.mark.parametrize("normalise", ["none", "batch"])
def test_a_critic_s_values_are_the_baseline(normalise: str) -> None:
    """With λ = γ = 1 an advantage is reward less value; the return, which is learnt, is the reward, never whitened."""
    values = [[np.linspace(0.1 * i, 0.5, n) for i, n in enumerate(row)] for row in LENGTHS]
    found = credit(groups(), values=values, baseline="critic", normalise=normalise)
    rewards = of_tokens(BATCH)
    plain = [r - v for r, v in zip(rewards, np.concatenate([v for row in values for v in row]), strict=True)]
    assert flat(found) == pytest.approx(plain if normalise == "none" else _whiten(plain), abs=1e-5)
    assert [x for row in found for c in row for x in c.returns.tolist()] == pytest.approx(rewards, abs=1e-6)
    assert torch.cat([c.values for row in found for c in row]).tolist() == pytest.approx(
        np.concatenate([v for row in values for v in row])
    )


def test_generalised_advantages_of_one_answer_by_hand() -> None:
    found = credit(
        [group(answer(3, 1.0))],
        values=[[[0.5, 0.2, 0.4]]],
        baseline="critic",
        normalise="none",
        gamma=0.9,
        gae_lambda=0.5,
    )
    third = 1.0 - 0.4
    second = 0.9 * 0.4 - 0.2 + 0.45 * third
    first = 0.9 * 0.2 - 0.5 + 0.45 * second
    assert flat(found) == pytest.approx([first, second, third])


# --- rejected answers -----------------------------------------------------------------------------------------------

BASELINES = [("group", "group"), ("group", "batch"), ("leave_one_out", "none"), ("none", "batch"), ("critic", "batch")]


@pytest.mark.parametrize(("baseline", "normalise"), BASELINES)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, "truncated"])
def test_a_rejected_answer_shifts_nothing(bad: Any, baseline: str, normalise: str) -> None:
    truncated = bad == "truncated"
    odd = answer(7, 100.0 if truncated else bad, finish_reason="length" if truncated else "stop")
    rest = [answer(n, r) for n, r in zip(LENGTHS[0], BATCH[0], strict=True)]
    options: dict[str, Any] = {"baseline": baseline, "normalise": normalise, "truncated": "exclude"}
    values = [[np.full(n, 0.3) for n in LENGTHS[0]]]
    kl = [[np.full(n, 0.1 * n) for n in LENGTHS[0]]]
    with_odd = [[kl[0][0], np.full(7, 9.0), *kl[0][1:]]], [[values[0][0], np.full(7, 9.0), *values[0][1:]]]
    options |= {"kl_in": "reward", "kl_coefficient": 0.1}
    without = credit([group(*rest)], kl, values if baseline == "critic" else None, **options)
    found = credit(
        [group(rest[0], odd, *rest[1:])], with_odd[0], with_odd[1] if baseline == "critic" else None, **options
    )
    assert found[0][1] is None
    assert flat(found) == flat(without)


def test_an_answer_whose_divergence_is_not_a_number_is_rejected_too() -> None:
    """Not only in the comparison: it would make the whole batch's statistics NaN."""
    kl = [[[0.1, 0.1], [math.nan, 0.0], [0.3]]]
    batch = [group(answer(2, 1.0), answer(2, 0.5), answer(1, 0.0))]
    for baseline, normalise in [("group", "group"), ("leave_one_out", "none"), ("none", "batch")]:
        found = credit(batch, kl, baseline=baseline, normalise=normalise, kl_in="reward", kl_coefficient=0.1)
        assert found[0][1] is None
        assert all(math.isfinite(x) for x in flat(found))


@given(
    st.lists(
        st.lists(st.none() | st.floats() | st.sampled_from([0.0, 1.0, 1e200, -1e308, 1.7e308]), max_size=4), max_size=3
    ),
    st.sampled_from(
        [
            *BASELINES[:4],
            ("group", "none"),
            ("leave_one_out", "batch"),
            ("none", "none"),
            ("critic", "none"),
            BASELINES[4],
        ]
    ),
)
def test_no_reward_whatsoever_raises_or_gives_a_number_that_is_not_finite(
    rewards: list[list[float | None]], how: tuple[str, str]
) -> None:
    batch = [group(*[answer(1 + i, r) for i, r in enumerate(row)]) for row in rewards]
    values = [[np.zeros(1 + i) for i in range(len(row))] for row in rewards]
    found = credit(batch, None, values if how[0] == "critic" else None, baseline=how[0], normalise=how[1])
    assert [len(row) for row in found] == [len(row) for row in rewards]
    assert all(math.isfinite(x) for x in flat(found))
    for row, given_row in zip(found, rewards, strict=True):
        assert [c is None for c in row] == [r is None or not math.isfinite(r) for r in given_row]


@pytest.mark.parametrize(("baseline", "normalise"), PLAIN)
def test_large_rewards_are_compared_as_others_are(baseline: str, normalise: str) -> None:
    large = credit(groups([[r * 1e14 for r in row] for row in BATCH]), baseline=baseline, normalise=normalise)
    scale = 1e14 if normalise == "none" else 1.0
    assert [x / scale for x in flat(large)] == pytest.approx(PLAIN[baseline, normalise], abs=1e-4)


def test_beyond_what_single_precision_can_square_a_reward_counts_as_the_largest() -> None:
    for huge in (1e16, 1e200, 1.7e308):
        assert shaped_reward(answer(1, huge), AlgorithmSettings(), LIMIT) == LARGEST_REWARD
        assert shaped_reward(answer(1, -huge), AlgorithmSettings(reward_scale=1e10), LIMIT) == -LARGEST_REWARD
        assert shaped_reward(answer(1, huge), AlgorithmSettings(reward_scale=1e10, reward_clip=2.0), LIMIT) == 2.0


@pytest.mark.parametrize("huge", [1e160, 1e200, 1e308])
def test_the_formulas_themselves_take_any_finite_reward(huge: float) -> None:
    rewards = [huge, 0.0, -huge, None, 0.25 * huge]
    small = [1.0, 0.0, -1.0, None, 0.25]
    assert group_relative(rewards) == pytest.approx(group_relative(small), abs=1e-5)
    assert [r and r / huge for r in leave_one_out(rewards)] == pytest.approx(leave_one_out(small))


@pytest.mark.parametrize(("baseline", "normalise"), [b for b in BASELINES if b[0] in ("group", "leave_one_out")])
def test_answers_that_tie_and_a_lone_answer_have_exactly_no_advantage(baseline: str, normalise: str) -> None:
    tied = [[0.1] * 4, [0.7] * 3]
    found = credit(groups(tied), baseline=baseline, normalise=normalise)
    assert flat(found) == [0.0] * sum(map(sum, LENGTHS))
    assert credit_metrics(found)["advantage/zero_fraction"] == 1.0
    lone = credit(
        [group(answer(3, 1.0)), group(answer(2, 0.5), answer(1, None))], baseline=baseline, normalise=normalise
    )
    assert flat(lone) == [0.0] * 5


def test_without_a_baseline_a_lone_answer_has_its_reward() -> None:
    assert flat(credit([group(answer(3, 0.5))], baseline="none", normalise="none")) == [0.5] * 3


@pytest.mark.parametrize(("baseline", "normalise"), BASELINES)
def test_an_answer_without_tokens_is_compared_and_gets_no_gradient(baseline: str, normalise: str) -> None:
    batch = [group(answer(0, 1.0), answer(2, 0.0), answer(3, 0.5))]
    kl = [[[], [0.1, 0.1], [0.2, 0.0, 0.0]]]
    values = [[[], [0.0, 0.0], [0.0, 0.0, 0.0]]] if baseline == "critic" else None
    found = credit(batch, kl, values, baseline=baseline, normalise=normalise, kl_in="reward", kl_coefficient=0.1)
    assert [len(c.advantages) for c in found[0]] == [0, 2, 3]
    assert found[0][0].mean == 0.0
    assert all(math.isfinite(x) for x in flat(found))
    if baseline == "leave_one_out":
        others = ((1.0 + (0.5 - 0.02)) / 2, (1.0 - 0.02) / 2)
        assert flat(found) == pytest.approx([-0.02 - others[0]] * 2 + [0.48 - others[1]] * 3)


def test_nothing_at_all_is_nothing_at_all() -> None:
    for how in ("group", "batch"):
        assert credit([], normalise=how) == []
        assert credit([group(), group(answer(1, None))], normalise=how) == [[], [None]]
    assert credit_metrics([]) == {}
    assert credit_metrics([[None]]) == {"advantage/rejected_fraction": 1.0}


# --- shaping --------------------------------------------------------------------------------------------------------


def test_rewards_are_scaled_then_clipped_then_penalised() -> None:
    algorithm = AlgorithmSettings(reward_scale=10.0, reward_clip=3.0, overlong_buffer=0.2, overlong_penalty=2.0)
    lengths = [15, 16, 17, 20]  # the buffer is 4 of the 20 tokens
    assert [shaped_reward(answer(n, 1.0), algorithm, LIMIT) for n in lengths] == [3.0, 3.0, 2.5, 1.0]
    assert shaped_reward(answer(20, -1.0), algorithm, LIMIT) == -5.0
    assert shaped_reward(answer(20, 0.1), algorithm, LIMIT) == pytest.approx(-1.0)


def test_the_penalty_of_a_long_answer_comes_into_the_comparison() -> None:
    batch = [group(answer(10, 1.0), answer(18, 1.0), answer(20, 0.0))]
    found = credit(batch, baseline="group", normalise="none", overlong_buffer=0.2)
    assert [c.shaped_reward for c in found[0]] == [1.0, 0.5, -1.0]
    assert [c.mean for c in found[0]] == pytest.approx([1 - 0.5 / 3, 0.5 - 0.5 / 3, -1 - 0.5 / 3])
    assert credit_metrics(found)["reward/shaped_mean"] == pytest.approx(0.5 / 3)


def test_truncated_answers_are_kept_unless_they_are_to_be_excluded() -> None:
    cut = answer(LIMIT, 0.0, finish_reason="length")
    assert shaped_reward(cut, AlgorithmSettings(), LIMIT) == 0.0
    assert shaped_reward(cut, AlgorithmSettings(truncated="exclude"), LIMIT) is None


# --- KL in the reward -----------------------------------------------------------------------------------------------

KL = [[[0.1, 0.2, 0.3], [0.5]]]
TWO = [group(answer(3, 1.0), answer(1, 0.0))]
IN_REWARD: dict[str, Any] = {"kl_in": "reward", "kl_coefficient": 0.5, "normalise": "none"}


def test_against_a_group_an_answer_pays_for_its_whole_divergence() -> None:
    totals = [1.0 - 0.5 * 0.6, 0.0 - 0.5 * 0.5]
    found = credit(TWO, KL, baseline="group", **IN_REWARD)
    assert flat(found) == pytest.approx([(totals[0] - totals[1]) / 2] * 3 + [(totals[1] - totals[0]) / 2])
    found = credit(TWO, KL, baseline="leave_one_out", **IN_REWARD)
    assert flat(found) == pytest.approx([totals[0] - totals[1]] * 3 + [totals[1] - totals[0]])
    assert [c.shaped_reward for c in found[0]] == [1.0, 0.0]


def test_without_a_baseline_a_token_pays_for_what_comes_from_it_on() -> None:
    found = credit(TWO, KL, baseline="none", **IN_REWARD)
    assert flat(found) == pytest.approx([1 - 0.5 * 0.6, 1 - 0.5 * 0.5, 1 - 0.5 * 0.3, -0.25])
    discounted = credit(TWO, KL, baseline="none", gamma=0.5, **IN_REWARD)
    last = 1 - 0.15
    assert flat(discounted) == pytest.approx([-0.05 + 0.5 * (-0.1 + 0.5 * last), -0.1 + 0.5 * last, last, -0.25])


def test_with_a_critic_the_divergence_is_among_the_rewards_of_the_tokens() -> None:
    found = credit(TWO, KL, [[[0.4, 0.4, 0.4], [0.0]]], baseline="critic", gae_lambda=0.0, **IN_REWARD)
    assert flat(found) == pytest.approx([-0.05, -0.1, 1 - 0.15 - 0.4, -0.25])
    assert found[0][0].returns.tolist() == pytest.approx([0.35, 0.3, 0.85])


# --- positions ------------------------------------------------------------------------------------------------------

HOLES = np.array([True, False, True, True, False, False, True])
"""Four sampled tokens, and three that a tool put between them."""
OLD = np.array([0, 0, 1, 2, 0, 0, 2], np.int32)
"""Their versions; of the sampled ones 0, 1, 2, 2."""


def holed(reward: float) -> Trajectory:
    return answer(7, reward, loss_mask=HOLES.copy(), versions=OLD.copy())


def test_values_and_divergences_belong_to_the_sampled_tokens() -> None:
    kl, values = [[[0.1, 0.2, 0.3, 0.4]]], [[[0.0, 1.0, 2.0, 3.0]]]
    found = credit([group(holed(1.0))], kl, values, baseline="critic", **IN_REWARD)
    to_go = [1 - 0.5, 1 - 0.45, 1 - 0.35, 1 - 0.2]
    assert flat(found) == pytest.approx([t - v for t, v in zip(to_go, values[0][0], strict=True)])
    assert found[0][0].values.tolist() == values[0][0]
    assert found[0][0].returns.tolist() == pytest.approx(to_go)


def test_overdue_tokens_pass_their_reward_on_and_take_no_further_part() -> None:
    """They were sampled, and what comes after them counts in their stead; but no gradient, no statistic is theirs."""
    kl, values = [[[0.1, 0.2, 0.3, 0.4]]], [[[0.0, 1.0, 2.0, 3.0]]]
    found = credit([group(holed(1.0))], kl, values, oldest=2, baseline="critic", gae_lambda=0.5, **IN_REWARD)
    whole = credit([group(holed(1.0))], kl, values, baseline="critic", gae_lambda=0.5, **IN_REWARD)
    assert flat(found) == flat(whole)[2:]
    assert found[0][0].values.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("baseline", ["none", "group", "leave_one_out"])
def test_overdue_tokens_are_no_part_of_the_statistics(baseline: str) -> None:
    batch = [group(holed(1.0), answer(3, 0.0, versions=np.full(3, 2, np.int32)), answer(5, 9.0))]
    found = credit(batch, oldest=2, baseline=baseline, normalise="batch")
    assert [len(c.advantages) for c in found[0]] == [2, 3, 0]
    x = np.array(flat(found))
    assert x.mean() == pytest.approx(0.0, abs=1e-6)
    assert x.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 3), st.integers(8, 30), st.integers(0, 2**31)
)
def test_what_is_learnt_arrives_at_its_own_token(lengths: list[int], oldest: int, budget: int, seed: int) -> None:
    """Through masks, overdue tokens and packing: of each target, value and log-probability are of the same token."""
    rng = np.random.default_rng(seed)
    answers = [
        answer(
            n,
            1.0,
            logprobs=(100 * i + np.arange(n)).astype(np.float32),
            versions=rng.integers(0, 4, n).astype(np.int32),
            loss_mask=rng.random(n) < 0.6,
        )
        for i, n in enumerate(lengths)
    ]
    values = [[t.logprobs[t.loss_mask] for t in answers]]
    (row,) = credit([group(*answers)], None, values, oldest, baseline="critic", normalise="none")
    samples = [with_credit(sample_of(t, learnt_tokens(t, oldest)), c) for t, c in zip(answers, row, strict=True)]
    found = []
    for m in make_micro_batches(samples, budget):
        assert torch.equal(m.values, m.behaviour)
        assert torch.allclose(m.advantages + m.values, m.returns)
        assert bool((m.versions >= oldest).all())
        found += m.behaviour.tolist()
    assert sorted(found) == [x for t in answers for x in t.logprobs[t.loss_mask & (t.versions >= oldest)].tolist()]
