"""In the sandbox: runs a whole program, as `python program.py` would."""

from __future__ import annotations
import __future__

import linecache
import sys
import traceback
import types
from typing import Any


def run(job: dict[str, Any]) -> int:
    """`job["source"]` as the main module, reading stdin and writing stdout. Returns the exit status."""
    sys.argv[:] = ["program.py"]
    return execute(job["source"], "__main__")[0]


def execute(source: str, name: str, prefix: str = "") -> tuple[int, dict[str, Any]]:
    """Run a module's source, after `prefix` in the same module; its exit status and what it defines that the prefix
    does not. A traceback goes to stderr."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    # Tracebacks show the program's lines.
    linecache.cache["program.py"] = (len(source), None, source.splitlines(keepends=True), "program.py")
    given: dict[str, Any] = {}
    status = 0
    try:
        before = compile(prefix, "prefix.py", "exec", dont_inherit=True)
        flags = before.co_flags & __future__.annotations.compiler_flag  # as if both were one source
        exec(before, module.__dict__)
        given.update(module.__dict__)
        exec(compile(source, "program.py", "exec", flags, dont_inherit=True), module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = (end.code or 0) & 0xFF
        else:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    return status, {key: value for key, value in module.__dict__.items() if given.get(key, given) is not value}
