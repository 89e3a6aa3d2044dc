"""What a worker hands in, held against what it was asked: a worker that runs another model, or a broken one, is found
out here and not in the trainer."""

from __future__ import annotations

import math

import numpy as np

from fleuve.types import Completion, GenerationRequest

ROUNDING = 1e-3
"""By which a log-probability may be above 0."""


def fault_of(
    completion: Completion, request: GenerationRequest, oldest: int, newest: int, vocabulary: int | None = None
) -> str:
    """Why `completion` cannot be an answer to `request`, in words; empty if it can.

    Args:
        oldest, newest: the versions that its tokens may have been sampled by.
        vocabulary: how many tokens there are, if that is known.

    A few passes over the tokens, none of them in Python; lists and arrays are taken alike.
    """
    ids, logprobs, versions = map(np.asarray, (completion.output_ids, completion.logprobs, completion.versions))
    if not len(ids) == len(logprobs) == len(versions):
        return f"{len(ids)} tokens came with {len(logprobs)} log-probabilities and {len(versions)} versions"
    if not len(ids):
        return "" if completion.finish_reason == "abort" else "the answer is empty"
    if len(ids) > (most := request.sampling.max_new_tokens - len(request.output_ids)):
        return f"the answer has {len(ids)} tokens, asked for were {most} at most"
    most_id = 2**31 if vocabulary is None else vocabulary
    for token in (ids.min(), ids.max()):
        if not 0 <= token < most_id:
            return f"there is no token {token}: the model has {most_id}"
    if not np.isfinite(logprobs).all() or logprobs.max() > ROUNDING:
        wrong = next((p for p in logprobs if not (math.isfinite(p) and p <= ROUNDING)), math.inf)
        return f"{wrong} is no log-probability"
    for version in (versions.min(), versions.max()):
        if not oldest <= version <= newest:
            return f"tokens of version {version} came, where only {oldest} to {newest} were served"
    return ""
