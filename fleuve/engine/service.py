"""What a server serves: the engine's loop with the model's name and tokenizer, opened from `EngineOptions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fleuve.engine.engine import Engine
from fleuve.engine.linear import pack_linears
from fleuve.engine.loop import EngineLoop
from fleuve.engine.options import EngineOptions
from fleuve.engine.scheduler import Limits
from fleuve.modeling.loading import DTYPES, load_model, pick_device
from fleuve.modeling.tokenizer import load_tokenizer

DEFAULT_CONTEXT = 32768  # of a model whose configuration does not say


@dataclass(slots=True)
class Service:
    """One served model; `weights` are the directories that new ones may be read from."""

    loop: EngineLoop
    tokenizer: Any
    name: str
    model: str
    context: int
    weights: Sequence[Path] = ()
    created: int = field(default_factory=lambda: int(time.time()))


def open_engine(options: EngineOptions) -> Engine:
    """Load model and tokenizer.

    Raises:
        UserError: the model or its tokenizer cannot be opened, or a device that is not there is asked for.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    model = load_model(options.model, DTYPES[options.dtype], pick_device(options.device))
    pack_linears(model)
    tokenizer = load_tokenizer(options.model)
    tokenizer.encode("")  # the first call may change the tokenizer's settings: before several threads share it
    limits = Limits(options.max_running, options.kv_cache_tokens, options.prefill_tokens, context_of(model))
    return Engine(model, limits, tokenizer=tokenizer, eos=end_tokens(model, tokenizer), version=options.version)


def context_of(model: torch.nn.Module) -> int:
    """The most positions that the model was made for."""
    config: Any = model.config
    return int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)


def end_tokens(model: torch.nn.Module, tokenizer: Any) -> list[int]:
    """Every token id that the model's generation settings or its tokenizer call an end."""
    generation: Any = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ids = set(ends) if isinstance(ends, list) else {ends}
    ids.add(tokenizer.eos_token_id)
    return sorted(int(i) for i in ids if i is not None)
