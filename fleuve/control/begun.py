"""What is known of an answer that is still being sampled, so that another worker can go on with it."""

from __future__ import annotations

from array import array
from typing import cast

import numpy as np

from fleuve.types import Completion, Float32Array, Int32Array, Progress


class Begun:
    """The first tokens of an answer with their log-probabilities and versions, each `[tokens]`, 12 bytes a token."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._logprobs = array("f")
        self._versions = array("i")

    @classmethod
    def of(cls, output_ids: Int32Array, logprobs: Float32Array, versions: Int32Array) -> Begun:
        """These tokens."""
        begun = cls()
        begun._ids.frombytes(output_ids.tobytes())
        begun._logprobs.frombytes(logprobs.tobytes())
        begun._versions.frombytes(versions.tobytes())
        return begun

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def arrays(self) -> tuple[Int32Array, Float32Array, Int32Array]:
        """Copies of the tokens, their log-probabilities and their versions."""
        return (
            np.array(self._ids, np.int32),
            np.array(self._logprobs, np.float32),
            np.array(self._versions, np.int32),
        )

    @property
    def output_ids(self) -> list[int]:
        """The tokens."""
        return self._ids.tolist()

    @property
    def newest(self) -> int | None:
        """The version of the last token; None without any."""
        return self._versions[-1] if self else None

    def add(self, progress: Progress) -> None:
        """What has come since; nothing is added that does not follow on what is there."""
        if progress.start == len(self):
            self._ids.extend(progress.output_ids.tolist())
            self._logprobs.extend(progress.logprobs.tolist())
            self._versions.extend(progress.versions.tolist())

    def follow(self, other: Begun) -> None:
        """`other` was sampled behind this by the next worker."""
        self._ids += other._ids
        self._logprobs += other._logprobs
        self._versions += other._versions

    def and_then(self, other: Begun) -> Begun:
        """This, and `other` behind it; both stay as they are."""
        both = Begun()
        both.follow(self)
        both.follow(other)
        return both

    def ended(self, completion: Completion) -> Completion:
        """The whole answer, where `completion` holds what came behind this."""
        if not self:
            return completion
        completion.output_ids = [*self._ids, *completion.output_ids]
        completion.logprobs = [*self._logprobs, *completion.logprobs]
        completion.versions = [*self._versions, *completion.versions]
        return completion

    def cut_off(self, request_id: str) -> Completion:
        """As an answer that ends here, of arrays: looking through it takes no step in Python."""
        ids, logprobs, versions = self.arrays
        return Completion(
            request_id=request_id,
            output_ids=cast(list[int], ids),
            logprobs=cast(list[float], logprobs),
            versions=cast(list[int], versions),
            finish_reason="abort",
        )
