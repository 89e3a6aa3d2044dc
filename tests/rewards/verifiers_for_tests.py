"""Reward functions that behave and misbehave; loaded by name in real verifier processes."""

import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy


class SilentError(Exception):
    """An exception that cannot even say what it is."""

    def __str__(self) -> str:
        raise SystemExit


def length(text: str, answer: str, row: dict) -> float:
    return float(len(text))


async def patient(text: str, answer: str, row: dict) -> float:
    import asyncio

    await asyncio.sleep(0.01)
    return 0.5


def obey(text: str, answer: str, row: dict) -> object:
    """Does what the answer says."""
    word, _, rest = text.partition(" ")
    match word:
        case "sleep":
            time.sleep(float(rest))
        case "spin":
            while True:
                pass
        case "big":
            return 9**9**9  # one endless C call that holds the interpreter's lock
        case "raise":
            raise ValueError("no such\ncase")
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "none":
            return None
        case "text":
            return "1.0"
        case "true":
            return True
        case "value":
            return eval(rest, {"np": numpy, "Decimal": Decimal, "Fraction": Fraction, "SilentError": SilentError})
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            return float(len(bytearray(int(rest))))
        case "print":
            print("noise " * 1000, flush=True)
            os.write(1, b"\x00\x00\x00\x05noise")
            subprocess.run(["echo", "more noise"], check=True)
            sys.stdin.read()
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(rest).write_text(str(child.pid))
            time.sleep(600)
        case "once":  # dies the first time, answers the second
            if not Path(rest).exists():
                Path(rest).touch()
                os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def draw(text: str, answer: str, row: dict) -> float:
    return float(numpy.random.random())


def length_slowly(text: str, answer: str, row: dict) -> float:
    time.sleep(0.01)
    return float(len(text))
