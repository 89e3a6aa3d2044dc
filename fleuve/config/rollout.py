"""`[rollout]`: how answers are generated, and by which engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fleuve.config.section import Dtype, NonNegative, Positive, Seconds, Section, Url
from fleuve.config.vllm import VllmSettings


class RolloutSettings(Section):
    """How answers are generated. Sizes are tokens; `threads` 0 leaves the choice to the placement. With `urls` the
    workers are vLLM servers that run already, one for each."""

    engine: Literal["embedded", "vllm"] = "embedded"
    urls: tuple[Url, ...] = ()
    workers: Positive = 1
    threads: NonNegative = 0
    interrupt: Literal["recompute", "keep", "finish"] = "recompute"
    group_size: Positive = 8
    max_new_tokens: Positive = 256
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    stop: tuple[str, ...] = ()
    dtype: Dtype = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_running: Positive = 128
    kv_cache_tokens: Positive = 65536
    prefill_tokens: Positive = 4096
    request_timeout: Seconds = 600.0
    update_timeout: Seconds = 120.0
    start_timeout: Seconds = 180.0
    health_timeout: Seconds = 10.0
    no_worker_timeout: Seconds = 600.0
    vllm: VllmSettings = VllmSettings()

    @model_validator(mode="after")
    def _urls_are_the_workers(self) -> RolloutSettings:
        if self.urls and self.engine != "vllm":
            raise ValueError('rollout.urls are those of vLLM servers: set rollout.engine = "vllm"')
        if self.urls and self.workers != len(self.urls):
            raise ValueError(
                f"rollout.urls names {len(self.urls)} servers, and rollout.workers = {self.workers}: each worker is "
                f"one of them, so set rollout.workers = {len(self.urls)}"
            )
        return self

    @model_validator(mode="after")
    def _keep_needs_spans(self) -> RolloutSettings:
        if self.engine == "vllm" and self.interrupt == "keep" and self.vllm.versions == "pieces":
            raise ValueError(
                'rollout.vllm.versions = "pieces" ends what is in flight at every update, so nothing is left to go on '
                'under the old cache: set rollout.interrupt = "recompute"'
            )
        return self
