"""What the answers come to: accuracy, pass@k, and the same of every part."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from fleuve.evaluate.answers import SOLVED, Answer
from fleuve.evaluate.statistics import mean_with_interval, pass_at_k, reported_k


class MixedVersionsError(RuntimeError):
    """Weights were updated during an evaluation: its number would be no version's."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """`accuracy` is the fraction solved (the mean over problems of the mean over their answers with a verdict), `low`
    and `high` its 95 % confidence interval; None if no answer has a verdict. `pass_at[k]` is the mean over the problems
    with k verdicts or more. `length_mean` is in tokens, `truncated` a fraction. `no_verdict` answers are left out of
    accuracy, pass@k and scores; `why` is the first one's reason. `version` is None if nothing was sampled.

    `parts` has the same of the problems of each verifier, where there are several, and of each value of the field that
    the numbers are broken down by."""

    problems: int
    samples: int
    accuracy: float | None
    low: float | None
    high: float | None
    pass_at: dict[int, float]
    score_mean: float | None
    length_mean: float
    truncated: float
    no_verdict: int
    version: int | None
    why: str = ""
    parts: dict[str, EvaluationResult] = {}

    def metrics(self, name: str) -> dict[str, float]:
        """As `eval/<name>/...`, and `eval/<name>/<part>/...`."""
        values = {f"pass@{k}": value for k, value in self.pass_at.items()}
        optional = {"low": self.low, "high": self.high, "score_mean": self.score_mean}
        values |= {key: value for key, value in optional.items() if value is not None}
        values |= {"length_mean": self.length_mean, "truncated": self.truncated, "no_verdict": float(self.no_verdict)}
        named = {f"eval/{name}/{key}": value for key, value in values.items()}
        for part, result in self.parts.items():
            short = re.sub(r"[^\w.-]+", "_", part)
            named |= result.metrics(f"{name}/{short}")
        return named


def summarise(answers: Sequence[Answer], samples: int, by: str | None = None) -> EvaluationResult:
    """Count the answers, `samples` in a row for each problem; `by` names the field whose values `Answer.part` has.

    Raises:
        MixedVersionsError: they are not all of one version.
    """
    versions = {v for a in answers for v in a.versions}
    if len(versions) > 1:
        raise MixedVersionsError(f"an evaluation met weights of versions {', '.join(map(str, sorted(versions)))}")
    problems = [answers[i : i + samples] for i in range(0, len(answers), samples)]
    labels = [_labels(problem[0], by) for problem in problems]
    verifiers = {answer.verifier for answer in answers}
    parts: dict[str, list[Sequence[Answer]]] = {}
    for problem, (verifier, value) in zip(problems, labels, strict=True):
        if len(verifiers) > 1:
            parts.setdefault(verifier, []).append(problem)
        if by is not None:
            parts.setdefault(value, []).append(problem)
    whole = _count(problems, samples)
    return msgspec.structs.replace(whole, parts={label: _count(parts[label], samples) for label in sorted(parts)})


def _labels(answer: Answer, by: str | None) -> tuple[str, str]:
    return f"verifier={answer.verifier}", f"{by}={answer.part}"


def _count(problems: Sequence[Sequence[Answer]], samples: int) -> EvaluationResult:
    answers = [answer for problem in problems for answer in problem]
    # Answers without a verdict are left out, not counted as wrong.
    counts: list[tuple[int, int]] = []
    for problem in problems:
        scores = [a.score for a in problem if a.score is not None]
        if scores:
            counts.append((len(scores), sum(score > SOLVED for score in scores)))
    scores = [a.score for a in answers if a.score is not None]
    accuracy, low, high = mean_with_interval([c / n for n, c in counts]) if counts else (None, None, None)
    pass_at = {}
    for k in reported_k(samples):
        values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if values:
            pass_at[k] = sum(values) / len(values)
    return EvaluationResult(
        problems=len(problems),
        samples=samples,
        accuracy=accuracy,
        low=low,
        high=high,
        pass_at=pass_at,
        score_mean=sum(scores) / len(scores) if scores else None,
        length_mean=sum(a.tokens for a in answers) / max(1, len(answers)),
        truncated=sum(a.finish_reason == "length" for a in answers) / max(1, len(answers)),
        no_verdict=len(answers) - len(scores),
        version=min((v for a in answers for v in a.versions), default=None),
        why=next((a.reason for a in answers if a.score is None), ""),
    )
