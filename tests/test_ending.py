"""How a serving process ends: its exit code, its words, and that no thread holds it up."""

import subprocess
import sys
import time

import pytest

BUSY = "threading.Thread(target=time.sleep, args=(30,)).start()"


def _run(body: str) -> tuple[int, str, float]:
    code = f"import asyncio, threading, time\nfrom fleuve import ending\nfrom fleuve.errors import UserError\n{body}"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr, time.monotonic() - started


@pytest.mark.parametrize("leave", ["ending.leave_after(work)", "ending.leave_after_running(asyncio.to_thread(work))"])
@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        ("pass", 0, ""),
        ("raise UserError('no such thing')", 2, "error: no such thing\n"),
        ("raise RuntimeError('ours')", 1, "RuntimeError: ours\n"),
    ],
)
def test_the_exit_code_and_the_words_say_whose_fault_it_was(leave: str, work: str, code: int, words: str) -> None:
    status, said, seconds = _run(f"def work():\n    {BUSY}\n    {work}\n{leave}")
    assert status == code
    assert said.endswith(words)
    assert ("Traceback" in said) == (code == 1)
    assert seconds < 20


@pytest.mark.parametrize("leave", ["ending.leave_after(work)", "ending.leave_after_running(asyncio.to_thread(work))"])
def test_ctrl_c_ends_it_without_words_and_without_waiting_for_threads(leave: str) -> None:
    interrupt = "    import os, signal\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)"
    status, said, seconds = _run(f"def work():\n    {BUSY}\n{interrupt}\n{leave}")
    assert (status, said) == (130, "")
    assert seconds < 20
