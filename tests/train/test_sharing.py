"""Sequences shared out to ranks: each exactly once, under the cap, in equal numbers of micro-batches, evenly."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.train.packing import Bins, pack
from fleuve.train.sharing import SequenceCost, round_costs, share_out

lengths_of = st.lists(st.integers(1, 1000), max_size=60)
costs = st.sampled_from([SequenceCost(), SequenceCost(1e-3), SequenceCost(0.1)])


@settings(max_examples=150)
@given(lengths=lengths_of, ranks=st.integers(1, 9), budget=st.integers(1000, 4000), cost=costs)
def test_every_sequence_is_in_one_micro_batch_of_one_rank_none_is_over_the_budget_and_all_ranks_run_as_many(
    lengths: list[int], ranks: int, budget: int, cost: SequenceCost
) -> None:
    shares = share_out(lengths, ranks, budget, cost)
    assert len(shares) == ranks
    assert len({len(bins) for bins in shares}) == 1
    assert sorted(i for bins in shares for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for bins in shares for b in bins)
    assert shares == share_out(lengths, ranks, budget, cost)
    assert len(shares[0]) == -(-len(pack(lengths, budget)) // ranks)


@settings(max_examples=50)
@given(lengths=lengths_of, budget=st.integers(1000, 4000), cost=costs)
def test_one_rank_gets_what_the_packer_makes(lengths: list[int], budget: int, cost: SequenceCost) -> None:
    assert share_out(lengths, 1, budget, cost) == [pack(lengths, budget)]


def test_a_sequence_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens"):
        share_out([3, 11], 2, 10, SequenceCost())


def test_a_rank_with_nothing_left_to_compute_has_an_empty_micro_batch() -> None:
    assert share_out([5], 3, 10, SequenceCost()) == [[[0]], [[]], [[]]]


def test_ranks_are_balanced_by_cost_and_not_by_tokens() -> None:
    """One sequence of 1,000 tokens costs as much as sixteen of 100 where attention is dear."""
    lengths, cost = [1000] + [100] * 16, SequenceCost(1e-3)
    (long,), (short,) = share_out(lengths, 2, 4000, cost)
    assert long == [0]
    assert sum(lengths[i] for i in short) == 1600


@settings(max_examples=120)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=7), budget=st.integers(60, 150), cost=costs)
def test_rounds_take_little_longer_than_in_the_best_of_all_possible_shares(
    lengths: list[int], budget: int, cost: SequenceCost
) -> None:
    """Against every way to share out as many micro-batches over two ranks."""
    shares = share_out(lengths, 2, budget, cost)
    found = sum(round_costs(shares, lengths, cost))
    best = min(
        sum(sorted((sum(cost(lengths[i]) for i in b) for b in bins), reverse=True)[::2])
        for bins in _all_ways(len(lengths), 2 * len(shares[0]))
        if all(sum(lengths[i] for i in b) <= budget for b in bins)
    )
    assert found <= best * 1.34 + 1e-6


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 1000), min_size=64, max_size=160), ranks=st.integers(2, 8), cost=costs)
def test_many_sequences_leave_ranks_waiting_for_each_other_hardly_at_all(
    lengths: list[int], ranks: int, cost: SequenceCost
) -> None:
    shares = share_out(lengths, ranks, 8000, cost)
    work = sum(map(cost, lengths)) / ranks
    assert sum(round_costs(shares, lengths, cost)) <= work + max(map(cost, lengths))


def _all_ways(sequences: int, bins: int) -> Iterator[Bins]:
    """Every split into at most `bins` bins (which of equal bins is which does not count)."""

    def extend(made: Bins, i: int) -> Iterator[Bins]:
        if i == sequences:
            yield [list(b) for b in made] + [[] for _ in range(bins - len(made))]
            return
        for b in made:
            b.append(i)
            yield from extend(made, i + 1)
            b.pop()
        if len(made) < bins:
            made.append([i])
            yield from extend(made, i + 1)
            made.pop()

    yield from extend([], 0)
