"""How a minibatch is shared out: to data-parallel ranks by tokens, on each rank by the trainer's own packer."""

from __future__ import annotations

from collections.abc import Sequence

from fleuve.train.packing import pack, spread


def rank_micro_batches(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Micro-batch by micro-batch, what each rank computes: `[micro-batches][ranks][sequences]`, lengths in tokens.

    Ranks get about as many tokens each. All run as many micro-batches as the one that needs most (they gather weights
    together); one that has none left computes a dummy, an empty list here. Each rank has its fullest first.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    shares: list[list[list[int]]] = []
    for indices in spread(lengths, ranks):
        own = [lengths[i] for i in indices]
        bins = [[own[i] for i in b] for b in pack(own, budget)]
        shares.append(sorted(bins, key=sum, reverse=True))
    most = max((len(bins) for bins in shares), default=0)
    idle: list[list[list[int]]] = [[] for _ in range(ranks - len(shares))]
    return [[bins[k] if k < len(bins) else [] for bins in [*shares, *idle]] for k in range(most)]
