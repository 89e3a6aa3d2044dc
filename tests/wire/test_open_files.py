"""A process that talks to engines may hold as many connections as the system allows."""

import resource
import subprocess
import sys

from fleuve.wire.open_files import allow_many_connections

SHELL_SUGGESTS = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
"""


def in_a_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SHELL_SUGGESTS + code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_the_limit_is_raised_as_far_as_it_goes():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    printed = int(in_a_process("from fleuve.wire.open_files import allow_many_connections as f\nprint(f())"))
    assert printed == hard or (hard == resource.RLIM_INFINITY and printed >= 10240)


def test_a_limit_that_cannot_be_raised_stays():
    assert allow_many_connections() == allow_many_connections()


def test_a_client_of_engines_raises_it():
    code = """
import asyncio
from fleuve.rollout.client import EngineClient

async def main():
    async with EngineClient("worker-0", "http://127.0.0.1:1", 1.0, 1.0):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

print(asyncio.run(main()))
"""
    assert int(in_a_process(code)) > 256
