"""What a loss saw of three policies (behaviour, proximal, current), by the staleness of the tokens.

One mean over a batch says that clipping or weights became large; only by staleness does a user see *which* data did
it. Everything is kept as sums, so that micro-batches and ranks can be added up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BUCKETS = ((0, "0"), (1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (None, "17+"))
"""Staleness up to (None: any), and the bucket's name in metrics."""

_BOUNDS = torch.tensor([bound for bound, _ in BUCKETS if bound is not None])

_COLUMNS = 10
"""Of `LossSums.sums`: what `loss_sums` adds up."""


class TokenFacts(NamedTuple):
    """Of each token, all `[tokens]` and without gradient: `staleness`; whether the clip cut its gradient at its upper
    or lower bound; whether the correction dropped the token or bounded its weight; log π_θ/π_prox; log
    π_prox/π_behav; the estimate of KL(π_θ ‖ π_ref), None where there is no reference."""

    staleness: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    capped: Tensor
    log_ratio: Tensor
    log_weight: Tensor
    kl_reference: Tensor | None = None


class LossSums(NamedTuple):
    """Sums over tokens `[buckets, columns]` and largest weights `[buckets]`; add those of several micro-batches."""

    sums: Tensor
    weight_max: Tensor

    @classmethod
    def none(cls) -> LossSums:
        """Those of no token."""
        sums = torch.zeros(len(BUCKETS), _COLUMNS, dtype=torch.float64)
        return cls(sums, torch.zeros(len(BUCKETS), dtype=torch.float64))

    def __add__(self, other: object) -> LossSums:
        if not isinstance(other, LossSums):
            return NotImplemented
        return LossSums(self.sums + other.sums, torch.maximum(self.weight_max, other.weight_max))

    def metrics(self) -> dict[str, float]:
        """Means over all tokens as `loss/NAME`, and over those of one staleness as `by_staleness/NAME/BUCKET`.

        `clip_fraction` (`clip_high_fraction` + `clip_low_fraction`): tokens whose gradient the clip cut.
        `capped_fraction`: tokens that the correction dropped, or whose weight it bounded.
        `behaviour_weight_mean`, `behaviour_weight_max`: of w = π_prox / π_behav before any cap.
        `effective_sample_size`: (Σw)² / (n Σw²): 1 when all weights are equal, 1/n when one token has it all.
        `approx_kl`, `kl_behaviour_proximal`, `kl_behaviour_current`: KL(π_prox ‖ π_θ), KL(π_behav ‖ π_prox) and
        KL(π_behav ‖ π_θ) by the estimator x − 1 − log x of Schulman's note (2020), x the ratio of the second policy to
        the first; the tokens are the behaviour policy's, so the first of the three is approximate.
        `kl_reference`: KL(π_θ ‖ π_ref) as it is in the loss, weighted; absent where it is not.
        """
        totals = _metrics(self.sums.sum(0).tolist(), float(self.weight_max.max()))
        metrics = {f"loss/{name}": value for name, value in totals.items() if name != "tokens"}
        for (_, bucket), row, largest in zip(BUCKETS, self.sums.tolist(), self.weight_max.tolist(), strict=True):
            metrics |= {f"by_staleness/{name}/{bucket}": value for name, value in _metrics(row, largest).items()}
        return metrics


def bucket_of(staleness: Tensor) -> Tensor:
    """The index into `BUCKETS` of each staleness, `[tokens]`; what is negative (never trained) counts as 0."""
    return torch.bucketize(staleness, _BOUNDS.to(staleness.device))


@torch.no_grad()
def loss_sums(facts: TokenFacts) -> LossSums:
    """Add up what is known of each token."""
    weight = facts.log_weight.exp()
    both = facts.log_ratio + facts.log_weight
    columns = (
        torch.ones_like(weight),
        facts.clipped_high,
        facts.clipped_low,
        facts.capped,
        weight,
        weight.square(),
        facts.log_ratio.double().expm1() - facts.log_ratio,
        facts.log_weight.double().expm1() - facts.log_weight,
        both.double().expm1() - both,
        torch.full_like(weight, math.nan) if facts.kl_reference is None else facts.kl_reference,
    )
    table = torch.stack([column.to(torch.float64) for column in columns], dim=1)
    buckets = bucket_of(facts.staleness)
    sums = table.new_zeros(len(BUCKETS), len(columns)).index_add_(0, buckets, table)
    largest = table.new_zeros(len(BUCKETS)).scatter_reduce_(0, buckets, weight.to(torch.float64), "amax")
    return LossSums(sums, largest)


def _metrics(row: list[float], weight_max: float) -> dict[str, float]:
    tokens, high, low, capped, weight, weight_squared, kl, kl_before, kl_whole, kl_reference = row
    if tokens == 0:
        return {}
    metrics = {
        "tokens": tokens,
        "clip_fraction": (high + low) / tokens,
        "clip_high_fraction": high / tokens,
        "clip_low_fraction": low / tokens,
        "capped_fraction": capped / tokens,
        "behaviour_weight_mean": weight / tokens,
        "behaviour_weight_max": weight_max,
        "effective_sample_size": weight**2 / (tokens * weight_squared),
        "approx_kl": kl / tokens,
        "kl_behaviour_proximal": kl_before / tokens,
        "kl_behaviour_current": kl_whole / tokens,
    }
    return metrics if math.isnan(kl_reference) else metrics | {"kl_reference": kl_reference / tokens}
