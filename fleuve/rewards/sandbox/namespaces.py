"""The walls: what a program sees of the machine.

The fork server moves into namespaces of its own and builds a root directory there: Python's standard library and the
shared libraries it loads, read-only, a few devices, and nothing else. No /proc, no program that could be executed, no
network device. Each sandbox then gets its own process namespace and its own empty scratch folder on top.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sysconfig

from fleuve.rewards.sandbox import syscalls

PROGRAM_ID = 1000
"""User and group of a program inside, where the machine's root started the server."""
OUTSIDE_ID = 65534
"""What that is outside: nobody."""
SCRATCH = "/tmp"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_BUILD = "/tmp"  # any folder that is there; what it holds is seen again once the new root has moved
_OLD = "/.host"


@dataclasses.dataclass(frozen=True)
class Walls:
    """What `build_root` could do. `own_user`: programs run as a user of their own, which needs root outside.
    `quiet`: System V memory and queues are off, so that one namespace serves all sandboxes."""

    own_user: bool
    quiet: bool


def enter() -> None:
    """Leave the host's namespaces; the parent then has to call `write_maps`."""
    namespaces = syscalls.NEW_MOUNTS | syscalls.NEW_NET | syscalls.NEW_IPC | syscalls.NEW_UTS
    syscalls.unshare(syscalls.NEW_USER | namespaces)


def write_maps(pid: int) -> None:
    """Who is who in the user namespace of a process that has called `enter`. Root's programs become nobody, who has a
    process limit (root has none) and owns nothing; another user's stay that user's, without any privilege."""
    user, group = os.geteuid(), os.getegid()
    nobody = f"{PROGRAM_ID} {OUTSIDE_ID} 1\n" if user == 0 else ""
    if user:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"0 {user} 1\n{nobody}")
    _write(f"/proc/{pid}/gid_map", f"0 {group} 1\n{nobody}")


def build_root() -> Walls:
    """Replace the root directory by one that holds only what a program needs."""
    with open("/proc/self/uid_map") as maps:
        own_user = len(maps.readlines()) > 1
    paths = [path for path in _needed() if os.path.exists(path)]
    quiet = _set_kernel("kernel/shmmni", "0") and _set_kernel("kernel/msgmni", "0")
    quiet = quiet and _set_kernel("kernel/sem", "0 0 0 0")
    _set_kernel("user/max_user_namespaces", "0")
    syscalls.make_private()
    syscalls.mount_tmpfs(_BUILD, "mode=755,size=1m")
    os.mkdir(_BUILD + _OLD)
    syscalls.pivot_root(_BUILD, _BUILD + _OLD)
    os.chdir("/")
    for path in paths:
        _show(path)
    for name in ("site-packages", "dist-packages"):  # other people's code, which a program could not import anyway
        folder = os.path.join(sysconfig.get_path("stdlib"), name)
        if os.path.isdir(folder):
            syscalls.mount_tmpfs(folder, "mode=755,size=4k")
            syscalls.make_read_only(folder)
    os.makedirs(SCRATCH, exist_ok=True)
    for link in ("/lib", "/lib64"):  # where the loader looks
        if not os.path.lexists(link) and os.path.islink(_OLD + link):
            os.symlink(os.readlink(_OLD + link), link)
    syscalls.unmount(_OLD)
    os.rmdir(_OLD)
    syscalls.make_read_only("/", recursive=False)
    return Walls(own_user, quiet)


def new_scratch(walls: Walls, size: int, files: int) -> None:
    """An empty folder that only this sandbox sees; it becomes the current one."""
    owner = f"uid={PROGRAM_ID},gid={PROGRAM_ID}," if walls.own_user else ""
    syscalls.mount_tmpfs(SCRATCH, f"{owner}mode=700,size={size},nr_inodes={files}")
    os.chdir(SCRATCH)


def drop_privileges(walls: Walls) -> None:
    """Become the program's user, without any privilege, for good."""
    if walls.own_user:
        os.setgroups([])
        os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
    syscalls.give_up_privileges()


def _needed() -> list[str]:
    """Parents before what lies in them."""
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    with open("/proc/self/maps") as maps:
        libraries = {os.path.dirname(path) for path in re.findall(r"\s(/\S+\.so\S*)\n", maps.read())}
    libraries = {folder for folder in libraries if not any(folder.startswith(path + os.sep) for path in stdlib)}
    return sorted(stdlib | libraries | {"/etc/ld.so.cache", "/usr/share/zoneinfo", *_DEVICES})


def _show(path: str) -> None:
    """Bind a file or folder of the old root at the same place, read-only."""
    if os.path.isdir(_OLD + path):
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "x"):
            pass
    syscalls.bind(_OLD + path, path)
    if path not in _DEVICES:
        syscalls.make_read_only(path)


def _set_kernel(name: str, value: str) -> bool:
    """A kernel setting of these namespaces; False where this kernel does not leave it to them."""
    try:
        _write(f"/proc/sys/{name}", value)
    except OSError:
        return False
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
