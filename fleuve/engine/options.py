"""What an engine process is started with: one JSON argument, so that no command line has to be quoted."""

from __future__ import annotations

from typing import Literal

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model`: a Hugging Face directory, hub name or `builtin:NAME`. `threads` 0 leaves torch's own choice. The sizes
    are tokens: `kv_cache_tokens` bounds the KV cache, `prefill_tokens` the prompt tokens of one step. `version` is
    the policy version of the weights in `model`; `weights` is the directory that new ones may be read from (None: the
    model stays what it is); `name` is what logs and health reports call this engine."""

    model: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    max_running: int = 128
    kv_cache_tokens: int = 65536
    prefill_tokens: int = 4096
    version: int = 0
    weights: str | None = None
    name: str = "engine"
