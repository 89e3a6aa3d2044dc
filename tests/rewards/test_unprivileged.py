"""The sandbox for who is not root: the same walls, and no attack comes through. Run by root, which becomes nobody."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from as_nobody import MAY_NOT_MOUNT

from fleuve.errors import UserError
from fleuve.rewards.sandbox.level import choose

HERE = Path(__file__).parent
FEW = (
    "right_program or passwd or environment or kill or limits or (user and namespace) or connect or fork "
    "or children or daemon or verdicts or huge or own or share"
)


def as_nobody(*words: str) -> str:
    """What pytest says of these words, run by nobody."""
    if os.geteuid() != 0:
        pytest.skip("these tests are run by an ordinary user as they are")
    try:
        level = choose("auto", False)
    except UserError as error:
        pytest.skip(str(error))
    # Not pytest's own folder, which others may not look into.
    with tempfile.TemporaryDirectory(prefix="fleuve-nobody-") as folder:
        command = [sys.executable, str(HERE / "as_nobody.py"), folder, "-rs", "--tb=short", *words]
        run = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    if run.returncode == MAY_NOT_MOUNT:
        pytest.skip(f"this root may not mount anything: {run.stdout.strip()}")
    assert run.returncode == 0, (run.stdout + run.stderr)[-8000:]
    assert f"sandbox for programs: {level} (" in run.stdout  # as strong as root's
    return run.stdout


def test_a_few_attacks_by_nobody_s_programs() -> None:
    tests = [str(HERE / "test_attacks.py"), str(HERE / "test_sandbox.py"), "-k", FEW]
    assert re.search(r"\b[3-9]\d passed", as_nobody(*tests))


@pytest.mark.slow
def test_every_attack_by_nobody_s_programs() -> None:
    names = ("test_attacks.py", "test_sandbox.py", "test_code.py", "test_code_time.py")
    assert re.search(r"\b[2-9]\d\d passed", as_nobody(*(str(HERE / name) for name in names)))
