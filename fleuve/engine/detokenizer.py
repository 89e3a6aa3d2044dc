"""Tokens to text one by one, and stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

CONTEXT = 6  # prompt tokens decoded along, so that the first answer token gets its leading space right
INCOMPLETE = "�"  # how a decoder writes bytes that are not a whole character yet


class Detokenizer:
    """The text of one answer as it grows.

    A token's text depends on its neighbours (spaces, characters of several tokens), so each time a short window is
    decoded with and without the new token, and the difference is the new text.
    """

    def __init__(self, tokenizer: Any, prompt: Seq[int], stop: Seq[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._window = 0
        self._read = len(self._ids)
        self._stop = tuple(s for s in stop if s)
        self._longest_stop = max((len(s) for s in self._stop), default=0)
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> None:
        """Add one token; afterwards `text` has grown, or `stopped` is set and `text` ends before the stop string."""
        self._ids.append(token)
        known = self._decode(self._ids[self._window : self._read])
        text = self._decode(self._ids[self._window :])
        if text.endswith(INCOMPLETE) or len(text) <= len(known):
            return
        self._window, self._read = self._read, len(self._ids)
        self._extend(text[len(known) :])

    def finish(self) -> str:
        """No more tokens come: what `take` has not given yet, bytes of an unfinished character included."""
        if not self.stopped:
            known = self._decode(self._ids[self._window : self._read])
            self._extend(self._decode(self._ids[self._window :])[len(known) :])
        rest = self.text[self._given :]
        self._given = len(self.text)
        return rest

    def take(self) -> str:
        """The text since the last call, less an end that may yet turn out to begin a stop string."""
        end = len(self.text)
        if not self.stopped:
            end -= max((n for s in self._stop for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        new = self.text[self._given : end]
        self._given = max(self._given, end)
        return new

    def _extend(self, new: str) -> None:
        start = max(len(self.text) - self._longest_stop + 1, 0)
        self.text += new
        if self._stop:
            found = [at for s in self._stop if (at := self.text.find(s, start)) >= 0]
            if found:
                self.text = self.text[: min(found)]
                self.stopped = True

    def _decode(self, ids: Seq[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
