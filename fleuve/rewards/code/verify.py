"""One check of a program: from the model's text to a score.

A program that is wrong, crashes, hangs or uses too much scores 0. A sandbox that cannot be had, a machine that is too
busy to run the program, or a row whose tests are none, is no verdict: it raises.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fleuve.rewards.code.examiner import BAD_TESTS
from fleuve.rewards.code.extraction import extract_program
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.output import same_output
from fleuve.rewards.code.rows import Functions, Outputs, tests_of
from fleuve.rewards.sandbox.client import Sandbox, SandboxServer
from fleuve.rewards.sandbox.clock import Clock
from fleuve.rewards.sandbox.level import choose
from fleuve.rewards.sandbox.limits import Limits
from fleuve.rewards.sandbox.run import Run, SandboxError, supervise

ROLES = {
    "program": "fleuve.rewards.code.program:run",
    "candidate": "fleuve.rewards.code.candidate:run",
    "examiner": "fleuve.rewards.code.examiner:run",
}
_ATTEMPTS = 2


class CodeVerifier:
    """Checks programs in the sandboxes of one warm fork server. Not for several threads."""

    def __init__(self, options: CodeOptions, promise: Callable[[float], None] = lambda seconds: None) -> None:
        """`promise`: gets the seconds from a check's beginning within which it will end, where these become more than
        `options.deadline`.

        Raises:
            UserError: the sandbox that the options ask for cannot be had here.
        """
        self.options = options
        self._promise = promise
        self.level = choose(options.sandbox, options.allow_weak_sandbox)
        self._server: SandboxServer | None = None

    def warm(self) -> None:
        """Start the fork server, if it does not run."""
        if self._server is None or not self._server.alive:
            self.close()
            self._server = SandboxServer(self.level, ROLES)

    def close(self) -> None:
        """End the fork server and all in it."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def __call__(self, text: str, row: dict[str, Any]) -> float:
        """The score of an answer.

        Raises:
            ValueError: the row has no tests that can be run.
            SandboxError: no sandbox could be had, it ended by no doing of the program, or no core was free.
            OverBudgetError: all tests passed so far, and the others would take longer than a check may.
        """
        options = self.options
        clock = Clock(options.deadline, options.budget, options.longest, self._promise)
        tests, limits = tests_of(row), self.options.limits(row)
        program = extract_program(text)
        if program is None:
            return 0.0
        for attempt in range(_ATTEMPTS):
            try:
                self.warm()
                passed = self._check(program, tests, row, limits, clock)
                break
            except SandboxError:
                self.close()
                if attempt + 1 == _ATTEMPTS or time.monotonic() >= clock.end:
                    raise
                clock.restart()
        if row.get("score", self.options.score) == "fraction":
            return sum(passed) / len(passed)
        return float(all(passed))

    def _check(
        self, program: str, tests: Functions | Outputs, row: dict[str, Any], limits: Limits, clock: Clock
    ) -> list[bool]:
        assert self._server is not None
        if isinstance(tests, Functions):
            with self._server.open(limits) as inside, self._server.open(limits) as outside:
                return _examine(_job(program, tests, row), tests, inside, outside, clock)
        with self._server.open(limits) as sandbox:
            all_needed = row.get("score", self.options.score) != "fraction"
            return _run_cases(program, tests, sandbox, clock, all_needed)


def _job(program: str, tests: Functions, row: dict[str, Any]) -> dict[str, str]:
    """The program, and before it what the row gives: all of the prompt if the answer only continues it."""
    name, prompt = tests.completes, row.get("prompt")
    if name and isinstance(prompt, str) and program[:1].isspace():
        defines = re.search(rf"^[ \t]*(?:async[ \t]+)?(?:def[ \t]+)?{name}\b\s*[(=:]", program, re.MULTILINE)
        if defines is None:
            return {"source": prompt + program}
    return {"source": program, "prefix": tests.prefix}


def _examine(
    candidate: dict[str, str], tests: Functions, inside: Sandbox, outside: Sandbox, clock: Clock
) -> list[bool]:
    ours, theirs = socket.socketpair()
    verdicts, verdict_sink = os.pipe()
    runs: list[Run] = []
    try:
        with ours, theirs:
            job = {"setup": tests.setup, "tests": tests.tests} | asdict(tests.names)
            examiner = outside.start("examiner", job, extra=(ours.fileno(), verdict_sink))
            runs.append(examiner)
            runs.append(inside.start("candidate", candidate, extra=(theirs.fileno(),)))
        os.close(verdict_sink)
        verdict_sink = -1
        supervise(runs, examiner, inside.limits.seconds, clock.check)
        if examiner.status == BAD_TESTS:
            raise ValueError(f"the row's tests cannot be run: {examiner.errors.decode(errors='replace').strip()}")
        os.set_blocking(verdicts, False)
        try:
            given = os.read(verdicts, len(tests.tests))
        except BlockingIOError:
            given = b""
    finally:
        for run in runs:
            run.close()
        os.close(verdicts)
        if verdict_sink >= 0:
            os.close(verdict_sink)
    return [given[i : i + 1] == b"1" for i in range(len(tests.tests))]


def _run_cases(program: str, tests: Outputs, sandbox: Sandbox, clock: Clock, all_needed: bool) -> list[bool]:
    passed: list[bool] = []
    for given, expected in tests.cases:
        if all_needed and passed and not passed[-1]:
            break
        clock.check(time.monotonic())
        run = sandbox.start("program", {"source": program}, given.encode(errors="replace"))
        try:
            ending = supervise([run], run, sandbox.limits.seconds, clock.check)
        finally:
            run.close()
        clock.add(ending.seconds)
        if ending.limit:  # it still runs: nothing more can be run in here
            break
        passed.append(run.status == 0 and same_output(run.output.decode(errors="replace"), expected))
    return passed + [False] * (len(tests.cases) - len(passed))
