"""How many connections a process may hold: as many as the system allows, not as many as the shell suggests.

Each answer in flight is a connection, on both of its ends. Systems suggest a limit of 1,024 open files or fewer (so
that old programs, which `select` from a fixed array, are safe) and allow many more to a program that asks.
"""

from __future__ import annotations

import contextlib
import resource


def allow_many_connections() -> int:
    """Raise this process's limit on open files as far as it may be raised without privileges; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where there is no hard limit, a kernel may still refuse more than some number of its own (macOS: 10,240).
    for wanted in (hard, 2**20, 65536, 10240):
        if wanted != resource.RLIM_INFINITY and wanted > soft >= 0:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
