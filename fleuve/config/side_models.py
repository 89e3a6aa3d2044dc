"""The models beside the policy, looked at before anything starts: the frozen reference, the critic's backbone.

Both are given the policy's tokens as they are, so a token must have the same number in all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleuve.config.models import ModelFacts, inspect_model
from fleuve.config.settings import Settings
from fleuve.errors import UserError


def side_models(settings: Settings) -> dict[str, str]:
    """The setting and the path of each model that is used and is not the policy's own."""
    algorithm, critic = settings.algorithm, settings.critic
    models = {}
    if algorithm.kl_coefficient > 0 and algorithm.reference is not None:
        models["algorithm.reference"] = algorithm.reference
    if algorithm.baseline == "critic" and critic.backbone == "own" and critic.path is not None:
        models["critic.path"] = critic.path
    return models


def inspect_side_model(path: str, key: str, policy: ModelFacts | None) -> ModelFacts:
    """Look at one of them; `policy` is None where there is none to compare it with.

    Raises:
        UserError: as `inspect_model`, or its tokens are not the policy's.
    """
    facts = inspect_model(path, key)
    if policy is None or policy.directory is None or facts.directory is None:
        return facts
    ours, theirs = (directory / "tokenizer.json" for directory in (policy.directory, facts.directory))
    if ours.exists() and theirs.exists() and (difference := _difference(ours, theirs)):
        raise UserError(f"{key} = {path}: its tokenizer is not the policy's, whose tokens it is given: {difference}")
    return facts


def context_problem(key: str, path: str, facts: ModelFacts, policy: ModelFacts, longest: int) -> str | None:
    """Whether sequences of `longest` tokens, which the policy can take, are too long for this model."""
    if facts.context is None or longest <= facts.context or (policy.context is not None and longest > policy.context):
        return None
    return f"{key} = {path}: its context is {facts.context}, the longest sequence has {longest} tokens"


def _difference(ours: Path, theirs: Path) -> str | None:
    """The first token of the policy that the other tokenizer numbers otherwise; None if there is none. (What the other
    has beyond the policy's tokens is never asked for.)"""
    if ours.read_bytes() == theirs.read_bytes():
        return None
    known, other = _numbers(ours), _numbers(theirs)
    for token, number in sorted(known.items(), key=lambda item: item[1]):
        if other.get(token) != number:
            instead = f"{other[token]}" if token in other else "unknown"
            return f"token {token!r} is {number} in {ours}, and {instead} in {theirs}"
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Token to number, of a `tokenizer.json`; read as JSON, which is several times as fast as building the tokenizer.

    Raises:
        UserError: the file cannot be read as a tokenizer.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score, numbered in order
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as a tokenizer: {type(error).__name__}: {error}") from None
