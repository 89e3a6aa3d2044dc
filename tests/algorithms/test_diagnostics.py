"""What a loss saw, by staleness: which tokens were cut, capped, weighed, and how far the policies are apart."""

import math

import pytest
import torch

from fleuve.algorithms.diagnostics import BUCKETS, TokenFacts, bucket_of, loss_sums


def test_every_staleness_has_its_bucket() -> None:
    names = [BUCKETS[i][1] for i in bucket_of(torch.tensor([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 10**6])).tolist()]
    assert names == ["0", "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "9-16", "17+", "17+"]


def facts() -> TokenFacts:
    """Two fresh tokens, on policy; two of staleness 3, with w = 2 and ½, one clipped high, the other low and capped."""
    return TokenFacts(
        staleness=torch.tensor([0, 0, 3, 3]),
        clipped_high=torch.tensor([False, False, True, False]),
        clipped_low=torch.tensor([False, False, False, True]),
        capped=torch.tensor([False, False, False, True]),
        log_ratio=torch.tensor([0.0, 0.0, math.log(1.5), math.log(0.5)]),
        log_weight=torch.tensor([0.0, 0.0, math.log(2.0), math.log(0.5)]),
    )


def test_means_over_all_tokens_and_over_those_of_one_staleness() -> None:
    metrics = loss_sums(facts()).metrics()
    assert metrics["loss/clip_fraction"] == 0.5
    assert metrics["loss/clip_high_fraction"] == metrics["loss/clip_low_fraction"] == 0.25
    assert metrics["by_staleness/clip_fraction/0"] == metrics["by_staleness/capped_fraction/0"] == 0.0
    assert metrics["by_staleness/clip_high_fraction/3-4"] == metrics["by_staleness/capped_fraction/3-4"] == 0.5
    assert metrics["by_staleness/tokens/0"] == metrics["by_staleness/tokens/3-4"] == 2.0
    assert metrics["by_staleness/behaviour_weight_mean/3-4"] == pytest.approx(1.25)
    assert metrics["by_staleness/behaviour_weight_max/3-4"] == metrics["loss/behaviour_weight_max"] == pytest.approx(2)
    assert metrics["by_staleness/effective_sample_size/3-4"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert metrics["by_staleness/effective_sample_size/0"] == 1.0


def test_kl_of_each_pair_of_policies() -> None:
    def k3(x: float) -> float:
        return x - 1 - math.log(x)

    metrics = loss_sums(facts()).metrics()
    assert metrics["by_staleness/approx_kl/3-4"] == pytest.approx((k3(1.5) + k3(0.5)) / 2)
    assert metrics["by_staleness/kl_behaviour_proximal/3-4"] == pytest.approx((k3(2.0) + k3(0.5)) / 2)
    assert metrics["by_staleness/kl_behaviour_current/3-4"] == pytest.approx((k3(3.0) + k3(0.25)) / 2)
    assert metrics["loss/approx_kl"] == pytest.approx((k3(1.5) + k3(0.5)) / 4)


def test_buckets_without_tokens_are_left_out() -> None:
    buckets = {name.rpartition("/")[2] for name in loss_sums(facts()).metrics() if name.startswith("by_staleness/")}
    assert buckets == {"0", "3-4"}


def test_the_sums_of_parts_are_those_of_the_whole() -> None:
    whole = facts()
    parts = [
        loss_sums(TokenFacts(*(x[part] for x in whole if x is not None)))
        for part in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    assert (parts[0] + parts[1] + parts[2]).metrics() == pytest.approx(loss_sums(whole).metrics())
