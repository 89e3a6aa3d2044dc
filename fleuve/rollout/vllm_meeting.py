"""The first look at a vLLM server: can it be a rollout worker, and what can it do?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from fleuve.contracts import RolloutError, WorkerLostError
from fleuve.rollout import vllm_wire as wire
from fleuve.rollout.vllm_http import ForbiddenError, Server

_LOOK = "a first look"


@dataclass(frozen=True)
class Abilities:
    """`version` is what was loaded last; None: nothing since it was started. `context`: the longest sequence that it
    takes, if it says so. `spans`: it says which weights sampled a token. `seats`: in how many processes it takes
    broadcasts; 0: its extension knows of none."""

    version: int | None
    context: int | None
    spans: bool
    seats: int


async def meet(server: Server) -> Abilities:
    """Find out, and have it run: whoever paused it may be gone.

    Raises:
        ForbiddenError: it wants another token.
        RolloutError: it lacks an option, in words that say which; or its weights are half of one version.
    """
    states = await _states(server)
    state = states[0]
    if not state.get("whole"):
        raise RolloutError(
            f"{server.name}: an update of the weights of {server.url} failed half-way: it has to be started anew"
        )
    models: Any = _read(server, await server.get("/v1/models", _LOOK))
    context = next((model.get("max_model_len") for model in models.get("data") or ()), None)
    try:
        await server.get("/weight_info", _LOOK)
        spans = True
    except WorkerLostError:
        raise
    except RolloutError:  # a server from before there were labels
        spans = False
    await server.post("/resume", None, _LOOK)
    await _try_out(server)
    seats = len(states) if all(one.get("broadcasts") for one in states) else 0
    return Abilities(state.get("version"), context, spans, seats)


async def _states(server: Server) -> list[dict[str, Any]]:
    """What each of the server's workers says of itself."""
    try:
        reply = _read(server, await server.post("/collective_rpc", {"method": "fleuve_state"}, _LOOK))
        first: dict[str, Any] = reply["results"][0]
        states = [first, *(dict(one) for one in reply["results"][1:])]
    except (WorkerLostError, ForbiddenError):
        raise
    except (RolloutError, KeyError, IndexError, TypeError) as error:
        raise RolloutError(
            f"{server.name}: {server.url} is no vLLM server with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
            f"fleuve_vllm.worker.FleuveWorker (docs/vllm.md): {str(error).removeprefix(f'{server.name}: ')}"
        ) from error
    return states


async def _try_out(server: Server) -> None:
    """One token: are log-probabilities those of the distribution sampled from? It has but one token here. (`top_k` 1
    would leave it all those that are equally likely.)"""
    sampling = {"max_tokens": 1, "allowed_token_ids": [1], "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    probe = {"token_ids": [0], "sampling_params": sampling}
    try:
        reply = await server.post("/inference/v1/generate", probe, "a first token")
        (choice,) = msgspec.json.decode(reply, type=wire.Chunk).choices
        _, (logprob,) = wire.tokens_of(choice)
    except WorkerLostError:
        raise
    except RolloutError as error:
        raise RolloutError(f"{error} (the server needs --enable-scale-out)") from error
    except ValueError as error:  # msgspec's and ours are
        raise RolloutError(f"{server.name}: its first token cannot be read: {error}") from error
    if logprob < -1e-3:
        raise RolloutError(
            f"{server.name}: {server.url} reports log-probabilities of a distribution that it does not sample from: "
            "start it with --logprobs-mode processed_logprobs"
        )


def _read(server: Server, reply: bytes) -> Any:
    try:
        return msgspec.json.decode(reply)
    except msgspec.DecodeError as error:
        raise RolloutError(f"{server.name}: its answer to {_LOOK} cannot be read: {error}") from error
