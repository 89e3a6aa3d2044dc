"""Which walls this machine can build."""

from __future__ import annotations

from fleuve.errors import UserError
from fleuve.rewards.sandbox.client import SandboxServer
from fleuve.rewards.sandbox.filter import supported
from fleuve.rewards.sandbox.run import SandboxError

TITLE = "sandbox for programs"
MEANING = {
    "namespaces": "own user, process, mount, network and IPC namespaces, and resource limits: a program sees no "
    "network, no process and no file but Python's own, and writes to a scratch folder in memory alone",
    "limits": "resource limits alone, the weakest: a program can read, write, signal and connect to what this user can",
}


def choose(wanted: str, allow_weak: bool) -> str:
    """The level to use: the one asked for, or with "auto" the best that this machine can build.

    Raises:
        UserError: it cannot be built, or is the weakest and not allowed.
    """
    why = ""
    if wanted in ("auto", "namespaces"):
        try:
            with SandboxServer("namespaces", {}):
                return "namespaces"
        except SandboxError as error:
            why = f"namespaces cannot be had here ({error})"
            if wanted == "namespaces":
                raise UserError(f"reward.code.sandbox = namespaces: {why}") from None
    if not allow_weak:
        raise UserError(
            f"reward.code: {why or 'resource limits'} would leave programs under {MEANING['limits']}; "
            "allow that with reward.code.allow_weak_sandbox = true"
        )
    return "limits"


def describe(level: str) -> str:
    """One line for whoever starts a run."""
    filtered = "system calls are filtered" if supported() else "system calls cannot be filtered on this machine"
    return f"{TITLE}: {level} ({MEANING[level]}; {filtered})"
