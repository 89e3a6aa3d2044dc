"""The nouns that every room passes around: prompts, completions, trajectories, groups, batches.

Plain `msgspec` structs over numpy arrays, so that they cross process boundaries without pickle and cost 4 bytes a
token in the controller. This module imports neither torch nor any other room.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

T = TypeVar("T")

Interrupt = Literal["recompute", "keep", "finish"]
Overdue = Literal["wait", "mask", "train", "drop"]
FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one answer is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch those filters off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer to be sampled by a rollout engine.

    `output_ids` are the answer's first tokens, where another engine has sampled them: it goes on from there as if it
    had never moved (`max_new_tokens` counts them, and each place in the answer has its own random number), and the
    completion holds the new tokens alone.
    """

    request_id: str
    input_ids: list[int]
    sampling: SamplingParams
    output_ids: list[int] = []


class Completion(msgspec.Struct, kw_only=True):
    """What an engine returns: `output_ids`, `logprobs` and `versions` are all `[tokens]`.

    `logprobs[t]` is the log-probability of `output_ids[t]` under the distribution it was sampled from (temperature,
    top-p and top-k included) by the weights of policy version `versions[t]`. The stop token, when one ended the
    answer, is the last of `output_ids`. `interruptions` counts the weight updates that met this answer in flight.
    """

    request_id: str
    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    interruptions: int = 0


class PackedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A `Completion` between two processes: its arrays are raw in msgpack, and lists in JSON. Reading lists of numbers,
    and looking through them, took the controller more time than all else that it does with an answer of 1,000 tokens.
    """

    request_id: str
    output_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason
    interruptions: int = 0

    @classmethod
    def of(cls, completion: Completion) -> PackedCompletion:
        """The same answer."""
        return cls(
            request_id=completion.request_id,
            output_ids=np.asarray(completion.output_ids, np.int32),
            logprobs=np.asarray(completion.logprobs, np.float32),
            versions=np.asarray(completion.versions, np.int32),
            finish_reason=completion.finish_reason,
            interruptions=completion.interruptions,
        )

    def opened(self) -> Completion:
        """The same answer, with the arrays in place of its lists."""
        return Completion(
            request_id=self.request_id,
            output_ids=cast(list[int], self.output_ids),
            logprobs=cast(list[float], self.logprobs),
            versions=cast(list[int], self.versions),
            finish_reason=self.finish_reason,
            interruptions=self.interruptions,
        )


class ProgressRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of an engine's `POST /progress`: how many new tokens of each answer in flight are known already."""

    known: dict[str, int]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of an answer in flight beyond its `start` first new tokens; the arrays are `[tokens]`."""

    request_id: str
    start: int
    output_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array


class Invitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """To the meeting `number` in the store at `address` (`HOST:PORT`), under the prefix `key`, where weights will be
    broadcast (`weights.broadcast`). `member` is what the one invited is called there; nobody is waited for longer than
    `seconds`."""

    address: str
    key: str
    number: int
    member: str
    seconds: float


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of an engine's `POST /update_weights`: a `WeightFile`, and what becomes of the answers in flight. With an
    `invitation` (not in the body otherwise) the file's bytes come by broadcast, and `path` is not read."""

    version: int
    path: str
    bytes: int
    checksum: str
    interrupt: Interrupt = "recompute"
    invitation: Invitation | msgspec.UnsetType = msgspec.UNSET


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of an engine's `POST /abort`."""

    request_ids: list[str]


class WeightUpdate(msgspec.Struct, kw_only=True):
    """An engine's reply to `update_weights`: after it, no token of an older version is sampled."""

    version: int
    interrupted: int
    seconds: float


class WeightFile(msgspec.Struct, frozen=True, kw_only=True):
    """Where one version of the weights lies, and how to know that it arrived whole."""

    version: int
    path: str
    bytes: int
    checksum: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, tokenised. `row` is the data row it came from (the verifier's reference answer is in it)."""

    id: str
    input_ids: list[int]
    text: str
    answer: str
    verifier: str = "math"
    row: dict[str, Any] = msgspec.field(default_factory=dict)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier says of one answer: a `score`, or none with a `reason` (never a zero for its own failure), and
    the `kind` of reason (`rewards.tally.REASONS`). The check took `seconds`, after it had waited `queue_seconds`."""

    score: float | None
    reason: str = ""
    seconds: float = 0.0
    kind: str = ""
    queue_seconds: float = 0.0


class Trajectory(msgspec.Struct, kw_only=True):
    """One answer to one prompt, with everything that training needs to know of how it came about.

    `output_ids`, `logprobs`, `versions`, `loss_mask` are `[tokens]`. `loss_mask` is False for tokens the policy did not
    sample (a tool's output) or that must get no gradient. `reward` is None when there is no verdict: such an answer is
    excluded from its group's statistics and from training, and `excluded` says why.
    """

    prompt_ids: Int32Array
    output_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    loss_mask: BoolArray
    finish_reason: FinishReason
    interruptions: int = 0
    reward: float | None = None
    excluded: str = ""
    advantage: float | None = None
    text: str = ""

    @property
    def length(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among the sampled tokens; None for an answer without any."""
        return int(self.versions.min()) if len(self.versions) else None

    def comparable_reward(self, truncated: Literal["keep", "exclude"]) -> float | None:
        """The reward, where the answer is compared with the others of its group and trained: None without a verdict,
        or if it ran into the limit and such answers are left out (`algorithm.truncated`)."""
        return None if truncated == "exclude" and self.finish_reason == "length" else self.reward


class Group(msgspec.Struct, kw_only=True):
    """The `group_size` answers sampled for one prompt, travelling under one slot of the gate."""

    id: int
    prompt: Prompt
    trajectories: list[Trajectory]
    admitted_version: int
    admitted_at: float = 0.0
    finished_at: float = 0.0

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token in the group: what its staleness is counted from."""
        versions = [v for t in self.trajectories if (v := t.oldest_version) is not None]
        return min(versions, default=self.admitted_version)


class Batch(msgspec.Struct, kw_only=True):
    """The groups of one training step, which makes version `version + 1` from `version`."""

    version: int
    groups: list[Group]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Every trajectory that has a reward, group by group."""
        return [t for g in self.groups for t in g.trajectories if t.reward is not None]


class StepResult(msgspec.Struct, kw_only=True):
    """The trainer's answer to one step: the version it made and its metrics (`area/name` → value).

    `advantages` is `[groups, samples]`, aligned with `batch.groups` and their trajectories (None where excluded).
    `trained` holds the ids of the groups that were trained: all of the batch, unless the step was interrupted.
    """

    version: int
    metrics: dict[str, float]
    advantages: list[list[float | None]]
    trained: list[int]


# --- the wire -------------------------------------------------------------------------------------------------------

_CODES: dict[np.dtype[Any], int] = {np.dtype(np.int32): 1, np.dtype(np.float32): 2, np.dtype(np.bool_): 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_CODES[value.dtype], np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_ext(code: int, data: memoryview) -> Any:
    dtype = _DTYPES.get(code)
    if dtype is None or len(data) % dtype.itemsize:
        raise msgspec.ValidationError(f"an array of kind {code} cannot have {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype)


def _decode_array(kind: type, value: Any) -> Any:
    wanted = get_args(get_args(kind)[1])[0]  # of an `NDArray[...]`
    if isinstance(value, np.ndarray) and value.dtype == wanted:
        return value
    found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"expected an array of {wanted.__name__}, got {found}")


def encode(value: Any) -> bytes:
    """Structs to msgpack bytes; arrays of int32, float32 and bool travel as raw bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_array)


def decode(data: bytes, kind: type[T]) -> T:
    """Msgpack bytes back to a struct.

    Raises:
        msgspec.DecodeError: the bytes are no msgpack, or do not have the shape of `kind`.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, ext_hook=_decode_ext, dec_hook=_decode_array)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


def to_json(value: Any) -> bytes:
    """Structs to one line of JSON, for files that people read; arrays become lists."""
    return msgspec.json.encode(value, enc_hook=lambda v: v.tolist() if isinstance(v, np.ndarray) else _encode_array(v))
