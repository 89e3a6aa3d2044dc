"""Which rank computes which sequences: as many micro-batches on every rank, each round of them about equally dear.

Ranks gather every layer's weights together, so all run the same number of micro-batches, and in each round all wait for
the dearest one. Attention makes a token of a long sequence dearer than one of a short sequence: ranks are balanced by
cost, not by tokens. The token budget is about memory, and stays hard.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fleuve.train.packing import Bins, even_out, pack, total


@dataclass(frozen=True)
class SequenceCost:
    """What a sequence of L tokens costs:  L + `quadratic` · L², in the cost of a token without attention.

    A layer multiplies each token with its matrices, and half of all pairs of tokens with each other, twice: 2 · P
    operations a token, and 4 · layers · width · L² / 2 a sequence (P: parameters in matrices; width: heads · head_dim).
    The quotient is layers · width / P, in the forward pass and about the same in the backward pass.
    """

    quadratic: float = 0.0

    @classmethod
    def of(cls, parameters: float, layers: int, width: int) -> SequenceCost:
        """That of a decoder."""
        return cls(layers * width / parameters)

    def __call__(self, length: int) -> float:
        return length + self.quadratic * length * length


def share_out(lengths: Sequence[int], ranks: int, budget: int, cost: SequenceCost) -> list[Bins]:
    """Split sequences into the micro-batches of `ranks` ranks, at most `budget` tokens each.

    All ranks get as many: the fewest that first-fit-decreasing allows. With one rank it is `pack`.

    Args:
        lengths: tokens of each sequence.

    Returns:
        `[ranks][micro-batches]`, lists of ascending indices into `lengths`; every index is in exactly one. A rank has
        an empty list where there is nothing left for it to compute. Micro-batches that are computed at the same time
        are at the same place, the dearest first.

    Raises:
        ValueError: a sequence alone is over the budget; says which.

    Example:
        >>> share_out([6, 5, 4, 3, 2], ranks=2, budget=6, cost=SequenceCost())
        [[[0], [2]], [[1], [3, 4]]]
    """
    bins = pack(lengths, budget)
    if ranks == 1:
        return [bins]
    rounds = -(-len(bins) // ranks)
    level = _spread(lengths, rounds * ranks, budget, cost)
    if level is None:
        level = [list(b) for b in bins] + [[] for _ in range(rounds * ranks - len(bins))]
    even_out(level, lengths, budget, cost)
    order = sorted(range(len(level)), key=lambda b: (-total(level[b], lengths, cost), level[b]))
    shares: list[Bins] = [[] for _ in range(ranks)]
    for place, b in enumerate(order):
        # Whoever got the dearest of one round gets the cheapest of the next.
        row, column = divmod(place, ranks)
        shares[column if row % 2 == 0 else ranks - 1 - column].append(sorted(level[b]))
    return shares


def round_costs(shares: Sequence[Bins], lengths: Sequence[int], cost: SequenceCost) -> list[float]:
    """What each round of micro-batches takes, which is what its dearest takes."""
    return [max(total(b, lengths, cost) for b in together) for together in zip(*shares, strict=True)]


def _spread(lengths: Sequence[int], count: int, budget: int, cost: SequenceCost) -> Bins | None:
    """The longest first, each into the cheapest of `count` bins that has room; None where one finds none."""
    bins: Bins = [[] for _ in range(count)]
    loads = [0] * count
    heap = [(0.0, b) for b in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = []
        while heap and loads[heap[0][1]] + lengths[index] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        total, b = heapq.heappop(heap)
        bins[b].append(index)
        loads[b] += lengths[index]
        for entry in (*full, (total + cost(lengths[index]), b)):
            heapq.heappush(heap, entry)
    return bins
