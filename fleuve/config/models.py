"""What can be known of a model from its directory alone, without loading it: is it whole, how long is its context."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleuve.config.nearest import did_you_mean, nearest_path
from fleuve.config.weight_files import check_weights, refuse_pickle
from fleuve.errors import UserError

BUILTIN = "builtin:"
ASSETS = Path(__file__).parent.parent / "assets"
FETCHED = {Path("models/smollm2"): "smollm2"}
"""Where `fleuve fetch NAME` puts a model, and its name: a directory that is not there can be made."""

_WEIGHTS = "*.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_LOCAL = ("/", "./", "../", "~", "models/", "runs/")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelFacts:
    """`directory` is None for a hub name whose files are not on this machine yet; then nothing else is known.
    `context` is the most tokens that a sequence may have, None where the model sets no bound; `vocabulary` how many
    tokens there are."""

    directory: Path | None
    context: int | None = None
    vocabulary: int | None = None
    tokenizer: Path | None = None


def resolve_model(path: str) -> str:
    """`builtin:NAME` to the directory of a model that ships with Fleuve; anything else stays as it is."""
    return str(ASSETS / path.removeprefix(BUILTIN)) if path.startswith(BUILTIN) else path


def inspect_model(path: str, key: str = "model.path") -> ModelFacts:
    """Look at a model directory, a `builtin:NAME`, or a hub name; `key` is what errors call the setting.

    Raises:
        UserError: there is no such model, or its directory lacks its configuration, weights or tokenizer, or its
            weights are not whole.
    """
    directory = Path(resolve_model(path))
    if not directory.is_dir():
        if path.startswith(BUILTIN):
            known = ", ".join(BUILTIN + name for name in builtin_models()) or "none"
            raise UserError(f"{key} = {path}: no such built-in model; there are: {known}")
        if directory.exists():
            raise UserError(
                f"{key} = {path}: is a file; a model is a directory with config.json, weights and tokenizer"
            )
        if _is_local(path):
            name = FETCHED.get(directory)
            hint = f"; make it with: fleuve fetch {name}" if name else did_you_mean(nearest_path(directory))
            raise UserError(f"{key} = {path}: no such directory{hint}")
        cached = _hub_snapshot(path)
        if cached is None:
            return ModelFacts(None)
        directory = cached
    return _inspect_directory(directory, f"{key} = {path}")


def builtin_models() -> list[str]:
    """Names of the models that ship with Fleuve."""
    return sorted(config.parent.name for config in ASSETS.glob("*/config.json"))


def _is_local(path: str) -> bool:
    """Whether the path of what is not there can only be meant as a directory: it is not of a hub name's form, or begins
    as paths do or with a directory that there is."""
    return not _HUB_NAME.fullmatch(path) or path.startswith(_LOCAL) or Path(path).parent.is_dir()


def _inspect_directory(directory: Path, place: str) -> ModelFacts:
    config_path = directory / "config.json"
    refuse_pickle(directory)
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = sorted(p.parent.relative_to(directory) for p in directory.glob("*/config.json"))
        inside += sorted(p.parent.relative_to(directory) for p in directory.glob("checkpoints/*/model/config.json"))
        hint = did_you_mean(str(directory / inside[-1]) if inside else None)
        raise UserError(f"{place}: no config.json in it, so it is not a model directory{hint}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{config_path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{config_path}: holds no JSON object")
    check_weights(directory)
    if next(directory.glob(_WEIGHTS), None) is None:
        raise UserError(f"{place}: no weights in it (looked for {_WEIGHTS})")
    tokenizer = next((directory / name for name in _TOKENIZERS if (directory / name).exists()), None)
    if tokenizer is None:
        raise UserError(f"{place}: no tokenizer in it (looked for {', '.join(_TOKENIZERS)})")
    return ModelFacts(
        directory,
        context=_number(config, _CONTEXT_FIELDS),
        vocabulary=_number(config, ("vocab_size",)),
        tokenizer=tokenizer,
    )


def _number(config: dict[str, object], fields: Sequence[str]) -> int | None:
    """The first of `fields` that says something, of the model or of its text part."""
    nested = config.get("text_config")
    for level in (config, nested if isinstance(nested, dict) else {}):
        for name in fields:
            value = level.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _hub_snapshot(name: str) -> Path | None:
    """Where the Hugging Face cache has `name`, if it has it whole enough to look at."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    repository = hub / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    complete = (snapshot / "config.json").exists() and next(snapshot.glob(_WEIGHTS), None) is not None
    return snapshot if complete else None
