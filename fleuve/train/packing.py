"""Which sequences share a micro-batch: a hard token budget, few micro-batches, and all about equally full.

Sequences are laid end to end without padding, so a micro-batch costs the sum of its lengths. First-fit-decreasing says
how many are enough; a local search then evens them out, because ranks wait for each other and the peak of memory is the
fullest one's.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence

Bins = list[list[int]]

Cost = Callable[[int], float]
"""What a sequence of so many tokens costs: more than a shorter one, and nothing if it has none."""


def pack(lengths: Sequence[int], budget: int) -> Bins:
    """Split sequences into micro-batches of at most `budget` tokens.

    Never more micro-batches than first-fit-decreasing makes, and never less evenly filled than its. The same input
    gives the same output.

    Args:
        lengths: tokens of each sequence.
        budget: the most tokens of one micro-batch.

    Returns:
        The micro-batches, each a list of ascending indices into `lengths`; every index is in exactly one.

    Raises:
        ValueError: a sequence alone is over the budget; says which.

    Example:
        >>> pack([6, 5, 4, 3, 2], budget=10)
        [[0, 2], [1, 3, 4]]
    """
    for index, length in enumerate(lengths):
        if length > budget:
            raise ValueError(f"sequence {index} has {length} tokens, more than the token budget of {budget}")
    if not lengths:
        return []
    bins = first_fit_decreasing(lengths, budget)
    even_out(bins, lengths, budget, _tokens)
    fewest = max(1, -(-sum(lengths) // budget))
    for count in range(fewest, len(bins) + 1):
        level = spread(lengths, count)
        if max(total(b, lengths, _tokens) for b in level) <= budget:
            even_out(level, lengths, budget, _tokens)
            if len(level) < len(bins) or _more_even(level, bins, lengths):
                bins = level
            break
    return sorted(sorted(b) for b in bins)


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> Bins:
    """The longest first, each into the first micro-batch that has room (at most 11/9 of the fewest possible, + 1)."""
    bins: Bins = []
    loads: list[int] = []
    for index in _longest_first(lengths):
        for b, load in enumerate(loads):
            if load + lengths[index] <= budget:
                bins[b].append(index)
                loads[b] += lengths[index]
                break
        else:
            bins.append([index])
            loads.append(lengths[index])
    return bins


def spread(lengths: Sequence[int], count: int) -> Bins:
    """The longest first, each into the emptiest of `count` bins, whatever the budget; empty ones are left out."""
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for index in _longest_first(lengths):
        load, b = heapq.heappop(heap)
        bins[b].append(index)
        heapq.heappush(heap, (load + lengths[index], b))
    return [b for b in bins if b]


def even_out(bins: Bins, lengths: Sequence[int], budget: int, cost: Cost) -> None:
    """Move or swap sequences out of the dearest bin, in place, while that narrows the gap to another one that has room.

    Each change lowers the sum of squared costs, so the search ends; it is cut off where it could take long.
    """
    costs = [total(b, lengths, cost) for b in bins]
    loads = [sum(lengths[i] for i in b) for b in bins]
    for _ in range(4 * len(lengths)):
        dearest = max(range(len(bins)), key=costs.__getitem__)
        for other in sorted(range(len(bins)), key=costs.__getitem__):
            gap, room = costs[dearest] - costs[other], budget - loads[other]
            exchange = _best_exchange(bins[dearest], bins[other], lengths, gap, room, cost)
            if exchange is not None:
                break
        else:
            return
        out, back = exchange
        bins[dearest].remove(out)
        bins[other].append(out)
        if back is not None:
            bins[other].remove(back)
            bins[dearest].append(back)
        for b in (dearest, other):
            costs[b] = total(bins[b], lengths, cost)
            loads[b] = sum(lengths[i] for i in bins[b])


def _best_exchange(
    dear: list[int], other: list[int], lengths: Sequence[int], gap: float, room: int, cost: Cost
) -> tuple[int, int | None] | None:
    """The sequence to move (and the one to take back, if any) that brings two bins `gap` apart closest together, where
    `other` has `room` for so many more tokens."""
    partners: list[int | None] = [None, *sorted(other, key=lambda i: (lengths[i], i))]
    sizes = [0 if p is None else lengths[p] for p in partners]
    prices = [cost(n) for n in sizes]
    best, exchange = gap * (1 - 1e-9), None  # a gain that is more than rounding
    for out in dear:
        price = cost(lengths[out])
        # The best shift is gap / 2; the nearest partners are beside price − gap / 2, if there is room.
        place = max(bisect_left(prices, price - gap / 2), bisect_left(sizes, lengths[out] - room))
        for p in (place - 1, place):
            if not 0 <= p < len(partners) or lengths[out] - sizes[p] > room:
                continue
            if price > prices[p] and (left := abs(gap - 2 * (price - prices[p]))) < best:
                best, exchange = left, (out, partners[p])
    return exchange


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _more_even(bins: Bins, others: Bins, lengths: Sequence[int]) -> bool:
    """Of two with the same number of bins: no fuller at the most, and of less variance."""
    ours, theirs = ([total(b, lengths, _tokens) for b in x] for x in (bins, others))
    return max(ours) <= max(theirs) and sum(x * x for x in ours) < sum(x * x for x in theirs)


def total(indices: Sequence[int], lengths: Sequence[int], cost: Cost) -> float:
    """What sequences cost together."""
    return sum(cost(lengths[i]) for i in indices)


def _tokens(length: int) -> int:
    return length
