"""When a run has failed: groups that come to nothing, whose prompt may be worth another try, and updates that do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fleuve.config.settings import Settings
from fleuve.contracts import RunError
from fleuve.types import StepResult

ATTEMPTS = 2
"""How often a prompt is tried whose groups fail, before it is given up."""


REASONS = frozenset({"timeout", "rollout failed", "no verdict", "truncated"})
"""Why a group is dropped that failed."""


class Failures:
    """Counts failed groups by prompt. A pure state machine. `attempts` go on in a run that is continued; what failed in
    a row begins anew, since somebody may have mended it."""

    def __init__(self, attempts: Mapping[str, int] | None = None) -> None:
        self._attempts: Counter[str] = Counter(attempts or {})
        self._in_a_row: set[str] = set()

    @property
    def attempts(self) -> dict[str, int]:
        """Failed groups of the prompts that are to be tried again, or are tried."""
        return dict(self._attempts)

    @property
    def in_a_row(self) -> int:
        """Different prompts whose groups failed since a group last succeeded. One bad prompt alone counts once."""
        return len(self._in_a_row)

    def failed(self, prompt: str) -> bool:
        """A group of `prompt` failed; whether the prompt should be tried again."""
        self._in_a_row.add(prompt)
        self._attempts[prompt] += 1
        if self._attempts[prompt] < ATTEMPTS:
            return True
        del self._attempts[prompt]
        return False

    def succeeded(self, prompt: str) -> None:
        """A group of `prompt` came through."""
        self._in_a_row.clear()
        self._attempts.pop(prompt, None)


def check_finite(result: StepResult, settings: Settings) -> None:
    """The groups of a step count as trained also where its updates were skipped for a NaN or an infinity: the version
    that it made has the weights of the one before. But that is no way to spend days.

    Raises:
        RunError: `trainer.max_nonfinite_in_a_row` updates in a row were skipped.
    """
    in_a_row = result.metrics.get("loss/nonfinite_in_a_row", 0.0)
    if in_a_row >= settings.trainer.max_nonfinite_in_a_row:
        raise RunError(
            f"{in_a_row:.0f} updates in a row had a loss or a gradient that is not finite, the last in step "
            f"{result.version}, and were skipped; see where it came from with: fleuve replay-step {settings.run_dir}"
        )
