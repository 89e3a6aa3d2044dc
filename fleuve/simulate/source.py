"""Prompts of a length, without end and without words: what an answer to one looks like is `lengths`' affair."""

from __future__ import annotations

import numpy as np

from fleuve.types import GenerationRequest, Prompt


class SimulatedSource:
    """Implements `contracts.PromptSource`. The first token of a prompt is its number, so that an engine knows it."""

    def __init__(self, prompt_tokens: int) -> None:
        self._tokens = prompt_tokens
        self._next = 0
        self._returned: list[Prompt] = []

    def next(self) -> Prompt:
        """A prompt that came back, or the next number."""
        if self._returned:
            return self._returned.pop(0)
        tokens = np.zeros(self._tokens, np.int32)
        tokens[0] = self._next
        prompt = Prompt(id=str(self._next), input_ids=tokens, text="", answer="")  # type: ignore[arg-type]
        self._next += 1
        return prompt

    def give_back(self, prompt: Prompt) -> None:
        """It is served again before new ones."""
        self._returned.append(prompt)

    def state(self) -> dict[str, object]:
        """The next number."""
        return {"next": self._next}

    def restore(self, state: dict[str, object]) -> None:
        """Continue with it."""
        self._next = int(str(state["next"]))


def prompt_and_sample(request: GenerationRequest) -> tuple[str, int]:
    """What a request is for: the id of its prompt, and which of the group's answers it is (`group/sample`, and
    `~attempt` where an answer goes on with another worker)."""
    sample = request.request_id.partition("/")[2].partition("~")[0]
    return str(int(request.input_ids[0])), int(sample)
