"""The suite is the same however it is started: a shell starts what runs in its background with Ctrl-C ignored, nohup
with a closed terminal, and every process that the tests start would inherit that. It computes in one thread a process:
several that wait for each other on cores that the test beside them needs are ten times slower."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from fleuve.errors import UserError
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.verify import CodeVerifier

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What holds is the same on a busy machine; how long it takes to hold is not.
settings.register_profile("fleuve", deadline=None)
settings.load_profile("fleuve")


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    """Of code, with time for a busy machine. Skips where no walls can be built for programs."""
    try:
        verifier = CodeVerifier(CodeOptions(deadline=60.0))
    except UserError as error:
        pytest.skip(str(error))
    yield verifier
    verifier.close()
