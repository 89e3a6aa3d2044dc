"""The numbers of an evaluation: unbiased pass@k, and how sure an accuracy is."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that of `k` answers drawn from `samples`, `right` of which are right, at least one is right.

    Unbiased for the chance that one of k fresh answers is right: 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", equation 1).

    Raises:
        ValueError: not 1 ≤ k ≤ samples, or not 0 ≤ right ≤ samples.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(f"pass@{k} of {right} right in {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def reported_k(samples: int) -> list[int]:
    """The k of the pass@k that are reported: 1, 2, 4, … and `samples` itself."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def mean_with_interval(means: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the problems' accuracies, each in [0, 1], with a 95 % confidence interval.

    The problems are what was drawn, so they are the unit, however many answers each got. It is Wilson's interval for
    as many coin tosses as would have the standard error that the problems show; where they show none (all right, all
    wrong, or a single one), for as many as there are problems.

    Raises:
        ValueError: no problems.
    """
    if not means:
        raise ValueError("no problem has a verdict")
    n = len(means)
    mean = math.fsum(means) / n
    variance = math.fsum((m - mean) ** 2 for m in means) / (n - 1) / n if n > 1 else 0.0
    tosses = mean * (1 - mean) / variance if variance > 0 else float(n)
    centre = mean + Z95**2 / (2 * tosses)
    half = Z95 * math.sqrt(max(mean * (1 - mean), 0.0) / tosses + Z95**2 / (4 * tosses**2))
    scale = 1 + Z95**2 / tosses
    return mean, max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)
