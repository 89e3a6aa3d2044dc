"""The engines that a run can generate with: what process each is, with which options, and who speaks to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fleuve.config.models import resolve_model
from fleuve.config.settings import RolloutSettings
from fleuve.launch.broadcasting import Receiving
from fleuve.rollout.client import EngineClient
from fleuve.rollout.vllm import VllmEngine
from fleuve.rollout.vllm_flight import detokenizer_of


class Client(Receiving, Protocol):
    """A rollout worker over HTTP, for as long as it is entered. `seats` is 0 if it takes no broadcasts."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *_: object) -> None: ...


class Kind(Protocol):
    """One of `rollout.engine`. Its process is `python -m MODULE '<options as JSON>'`, for `launch.host`."""

    module: str

    def options(
        self, name: str, model: str, rollout: RolloutSettings, threads: int, weights: Path | None
    ) -> Mapping[str, Any]:
        """Of a worker. `weights` is the directory that it may read new ones from."""

    def start_timeout(self, rollout: RolloutSettings) -> float:
        """Seconds until it must be up."""

    def client(
        self, name: str, url: str, token: str | None, model: str, rollout: RolloutSettings, request_timeout: float
    ) -> Client:
        """Who speaks to it."""


class Embedded:
    """Fleuve's own engine."""

    module = "fleuve.engine"

    def options(
        self, name: str, model: str, rollout: RolloutSettings, threads: int, weights: Path | None
    ) -> Mapping[str, Any]:
        return {
            "model": model,
            "dtype": rollout.dtype,
            "device": rollout.device,
            "threads": threads,
            "max_running": rollout.max_running,
            "kv_cache_tokens": rollout.kv_cache_tokens,
            "prefill_tokens": rollout.prefill_tokens,
            "name": name,
            "weights": None if weights is None else str(weights),
        }

    def start_timeout(self, rollout: RolloutSettings) -> float:
        return rollout.start_timeout

    def client(
        self, name: str, url: str, token: str | None, model: str, rollout: RolloutSettings, request_timeout: float
    ) -> Client:
        return EngineClient(name, url, request_timeout, rollout.update_timeout, token)


class Vllm:
    """A vLLM server: of this run, from the environment that `rollout.vllm.python` is of, or one that the user runs."""

    module = "fleuve.vllm"

    def options(
        self, name: str, model: str, rollout: RolloutSettings, threads: int, weights: Path | None
    ) -> Mapping[str, Any]:
        vllm = rollout.vllm
        return {
            "model": resolve_model(model),
            "python": vllm.python,
            "name": name,
            "dtype": rollout.dtype,
            "device": rollout.device,
            "threads": threads,
            "max_running": rollout.max_running,
            "kv_cache_tokens": rollout.kv_cache_tokens,
            "prefill_tokens": rollout.prefill_tokens,
            "context": vllm.context,
            "gpu_memory_utilization": vllm.gpu_memory_utilization,
            "tensor_parallel": vllm.tensor_parallel,
            "eager": vllm.eager,
            "stream_interval": vllm.stream_interval,
            "weights": None if weights is None else str(weights),
            "arguments": vllm.arguments,
        }

    def start_timeout(self, rollout: RolloutSettings) -> float:
        return rollout.vllm.start_timeout

    def client(
        self, name: str, url: str, token: str | None, model: str, rollout: RolloutSettings, request_timeout: float
    ) -> Client:
        watch = detokenizer_of(_tokenizer(model))
        versions = rollout.vllm.versions
        return VllmEngine(name, url, request_timeout, rollout.update_timeout, token, versions=versions, watch=watch)


def _tokenizer(model: str) -> Callable[[], Any]:
    def load() -> Any:
        from fleuve.modeling.tokenizer import load_tokenizer

        return load_tokenizer(model)

    return load


KINDS: Mapping[str, Kind] = {"embedded": Embedded(), "vllm": Vllm()}
