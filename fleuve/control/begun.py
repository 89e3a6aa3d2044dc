"""What is known of an answer that is still being sampled, so that another worker can go on with it."""

from __future__ import annotations

from array import array

from fleuve.types import Completion, Progress


class Begun:
    """The first tokens of an answer with their log-probabilities and versions, each `[tokens]`, 12 bytes a token."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._logprobs = array("f")
        self._versions = array("i")

    def __len__(self) -> int:
        return len(self._ids)

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

    def ended(self, completion: Completion) -> Completion:
        """The whole answer, where `completion` holds what came behind this."""
        if not self:
            return completion
        completion.output_ids = [*self._ids, *completion.output_ids]
        completion.logprobs = [*self._logprobs, *completion.logprobs]
        completion.versions = [*self._versions, *completion.versions]
        return completion

    def cut_off(self, request_id: str) -> Completion:
        """As an answer that ends here."""
        return self.ended(
            Completion(request_id=request_id, output_ids=[], logprobs=[], versions=[], finish_reason="abort")
        )
