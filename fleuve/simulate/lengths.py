"""How long each answer gets: drawn from a distribution, the same for the same seed, prompt and sample."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from fleuve.config.settings import Settings
from fleuve.errors import UserError

_NORMAL = NormalDist()


class AnswerLengths(Protocol):
    """Lengths in tokens, each between 1 and the longest answer allowed."""

    def draw(self, prompt: str, sample: int) -> int:
        """The length of one answer; `prompt` names the group that it belongs to."""


class _Correlated:
    """A quantile of a standard normal for each answer, part of it common to its prompt's (a Gaussian copula)."""

    def __init__(self, seed: int, prompt_share: float) -> None:
        self._seed = seed
        self._own, self._common = math.sqrt(1 - prompt_share), math.sqrt(prompt_share)

    def draw(self, prompt: str, sample: int) -> float:
        common = _gaussian(f"{self._seed}/{prompt}")
        return self._common * common + self._own * _gaussian(f"{self._seed}/{prompt}/{sample}")


class Lognormal:
    """exp(μ + σ z), cut off at `longest`; μ is such that what comes has the given mean."""

    def __init__(self, mean: float, sigma: float, longest: int, prompt_share: float = 0.5, seed: int = 0) -> None:
        if not 1 <= mean <= longest:
            raise ValueError(f"a mean of {mean:g} tokens is not between 1 and the longest answer's {longest}")
        self._longest, self._sigma = longest, sigma
        self.mu = _mu(mean, sigma, longest)
        self._normal = _Correlated(seed, prompt_share)

    def draw(self, prompt: str, sample: int) -> int:
        exponent = min(self.mu + self._sigma * self._normal.draw(prompt, sample), math.log(self._longest))
        return max(1, min(self._longest, round(math.exp(exponent))))


class Measured:
    """The lengths that were seen, each as likely as the others; those over `longest` are cut off."""

    def __init__(self, lengths: Sequence[int], longest: int, prompt_share: float = 0.5, seed: int = 0) -> None:
        if not lengths:
            raise ValueError("no lengths to draw from")
        self._sorted = sorted(max(1, min(length, longest)) for length in lengths)
        self._normal = _Correlated(seed, prompt_share)

    def draw(self, prompt: str, sample: int) -> int:
        place = _NORMAL.cdf(self._normal.draw(prompt, sample)) * len(self._sorted)
        return self._sorted[min(int(place), len(self._sorted) - 1)]


DEFAULT_MEAN = 0.3
"""Share of the longest answer that the mean is, when nobody says."""


def open_lengths(settings: Settings) -> AnswerLengths:
    """What `[simulate.lengths]` asks for.

    Raises:
        UserError: the file cannot be read or holds no lengths, or the mean is longer than the longest answer.
    """
    lengths, longest, seed = settings.simulate.lengths, settings.rollout.max_new_tokens, settings.simulate.seed
    if lengths.file is not None:
        return Measured(read_lengths(Path(lengths.file)), longest, lengths.prompt_share, seed)
    mean = max(1.0, DEFAULT_MEAN * longest) if lengths.mean is None else lengths.mean
    if mean > longest:
        raise UserError(
            f"simulate.lengths.mean = {mean:g} is longer than the longest answer, rollout.max_new_tokens = {longest}"
        )
    return Lognormal(mean, lengths.sigma, longest, lengths.prompt_share, seed)


def read_lengths(path: Path, key: str = "simulate.lengths.file") -> list[int]:
    """The lengths of the answers of a run directory (its `rollouts/*.jsonl`), or of a file with one integer a line.

    Raises:
        UserError: there is nothing to read, or a line is no length; says which.
    """
    if path.is_dir():
        files = sorted(path.glob("rollouts/*.jsonl"))
        if not files:
            raise UserError(f"{key} = {path}: no rollouts/*.jsonl in it, so it is not a run directory with answers")
        return [length for file in files for length in _of_rollouts(file, key)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key} = {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not (text := line.strip()):
            continue
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{key} = {path}, line {number}: {text[:40]!r} is no length; give one whole number a line")
        found.append(int(text))
    if not found:
        raise UserError(f"{key} = {path}: no lengths in it; give one whole number a line")
    return found


def _of_rollouts(file: Path, key: str) -> list[int]:
    try:
        with file.open(encoding="utf-8") as lines:
            groups = [json.loads(line) for line in lines if line.strip()]
        return [max(1, len(t["output_ids"])) for group in groups for t in group["trajectories"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: {file} cannot be read as rollouts: {type(error).__name__}: {error}") from None


def cut_mean(mu: float, sigma: float, longest: float) -> float:
    """The mean of min(exp(μ + σ z), longest) for a standard normal z: the lognormal's partial expectation below the
    cut-off, and the cut-off times the probability of what is above it."""
    limit = math.log(longest)
    if sigma == 0:
        return math.exp(min(mu, limit))
    below = (limit - mu) / sigma
    partial = math.exp(min(mu + sigma * sigma / 2, 700.0)) * _NORMAL.cdf(below - sigma)
    return partial + longest * (1 - _NORMAL.cdf(below))


def _mu(mean: float, sigma: float, longest: int) -> float:
    """By bisection: the mean grows with μ."""
    low, high = -10.0, math.log(longest) + 10 * sigma + 1
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle, sigma, longest) < mean else (low, middle)
    return (low + high) / 2


def _gaussian(key: str) -> float:
    """A standard normal that depends on nothing but `key`."""
    word = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return _NORMAL.inv_cdf((word + 0.5) / 2**64)
