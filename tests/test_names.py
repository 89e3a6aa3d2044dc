"""A folder of tests is on the path while tests are collected, so its name hides, or stands in for, a library's."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

TESTS = Path(__file__).parent


def libraries() -> set[str]:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    return {Requirement(line).name.replace("-", "_") for line in required} | {"vllm"} | sys.stdlib_module_names


def test_no_folder_of_tests_is_named_as_a_library():
    named = {path.name for path in TESTS.rglob("*") if path.is_dir()} & libraries()
    assert not named, f"with tests/{min(named)} on the path, 'import {min(named)}' finds the tests where it is missing"
