"""In the sandbox: runs a whole program, as `python program.py` would."""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from typing import Any


def run(job: dict[str, Any]) -> int:
    """`job["source"]` as the main module, reading stdin and writing stdout. Returns the exit status."""
    sys.argv[:] = ["program.py"]
    return execute(job["source"], "__main__")[0]


def execute(source: str, name: str) -> tuple[int, dict[str, Any]]:
    """Run a module's source; its exit status and what it defines. A traceback goes to stderr."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    # Tracebacks show the program's lines.
    linecache.cache["program.py"] = (len(source), None, source.splitlines(keepends=True), "program.py")
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF, module.__dict__
        print(end.code, file=sys.stderr)
        return 1, module.__dict__
    except BaseException:
        traceback.print_exc()
        return 1, module.__dict__
    return 0, module.__dict__
