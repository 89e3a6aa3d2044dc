"""How answers are sampled, from the settings, for training and evaluation alike."""

from __future__ import annotations

import hashlib

from fleuve.config.settings import RolloutSettings
from fleuve.types import SamplingParams


def sampling_params(rollout: RolloutSettings, temperature: float, seed: int = 0) -> SamplingParams:
    """`rollout`'s length, filters and stop strings, at a temperature that evaluation chooses for itself."""
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        seed=seed,
    )


def answer_seed(run_seed: int, prompt_id: str, sample: int) -> int:
    """The sampling seed of one answer: a function of the run, the prompt and the answer's number alone, so that a
    prompt that is served again gets the same random numbers, whatever else happened."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
