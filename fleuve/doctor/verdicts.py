"""Each check of `fleuve doctor`: facts of a node in, a finding out. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from fleuve.doctor.facts import NodeFacts
from fleuve.doctor.needs import Needs
from fleuve.doctor.probe import Reduced

Verdict = Literal["ok", "warn", "fail"]

TESTED = {"torch": ("2.9", "2.13"), "transformers": ("5.10", "5.24"), "ray": ("2.40", "2.60"), "vllm": ("0.32", "0.32")}
"""From the oldest that is asked for to the newest that Fleuve was tested with."""
PYTHON = ((3, 11), (3, 13))
SKEW = 1.0
"""Seconds between two nodes' clocks from which on their logs are confusing."""
SLOW_GLOO = 1.0
"""Seconds for 4 MB between two processes of one machine: a hundred times what it takes on a machine at rest."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the table. `advice` is what to do, empty where all is well."""

    check: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


Check = Callable[[NodeFacts, Needs], Finding | None]
"""None: it is of no concern."""


def python(facts: NodeFacts, needs: Needs) -> Finding:
    found, (oldest, newest) = facts.python[:2], PYTHON
    words = ".".join(map(str, facts.python))
    if found < oldest:
        return Finding("python", words, "fail", f"Fleuve needs {oldest[0]}.{oldest[1]} or later")
    if found > newest:
        return Finding("python", words, "warn", f"tested up to {newest[0]}.{newest[1]}")
    return Finding("python", words)


def package(name: str, version: str | None, needed: bool) -> Finding:
    """The version of a library, against those that Fleuve was tested with."""
    oldest, newest = TESTED[name]
    if version is None:
        if not needed:
            return Finding(name, "not installed (and not needed)")
        how = {"ray": 'pip install "ray[default]>=2.40"', "vllm": "make vllm"}.get(
            name, f'pip install "{name}>={oldest}"'
        )
        return Finding(name, "not installed", "fail", how)
    if _numbers(version) < _numbers(oldest):
        return Finding(name, version, "fail" if needed else "warn", f"needs {oldest} or later")
    if _numbers(version) > _numbers(newest):
        return Finding(name, version, "warn", f"tested from {oldest} to {newest}: watch the first steps")
    return Finding(name, version)


def torch(facts: NodeFacts, needs: Needs) -> Finding:
    return package("torch", facts.packages.get("torch"), True)


def transformers(facts: NodeFacts, needs: Needs) -> Finding:
    return package("transformers", facts.packages.get("transformers"), True)


def ray(facts: NodeFacts, needs: Needs) -> Finding:
    return package("ray", facts.packages.get("ray"), needs.ray)


def cores(facts: NodeFacts, needs: Needs) -> Finding:
    words = f"{facts.cpus} for {needs.processes} processes"
    if needs.gpus is not True and facts.cpus < needs.processes and not needs.ray:
        return Finding("cores", words, "warn", "processes share cores: fewer rollout.workers, or a larger machine")
    return Finding("cores", words if not needs.ray else f"{facts.cpus}")


def instructions(facts: NodeFacts, needs: Needs) -> Finding:
    words = " ".join(facts.features) or "none that matter"
    if needs.bf16 and not facts.devices.gpus and not {"amx_bf16", "avx512_bf16"} & set(facts.features):
        return Finding("CPU features", words, "warn", 'bfloat16 is slow on this CPU: use dtype = "float32"')
    return Finding("CPU features", words)


def gpus(facts: NodeFacts, needs: Needs) -> Finding:
    devices = facts.devices
    if devices.problem:
        bad: Verdict = "fail" if needs.gpus else "warn"
        return Finding(
            "GPUs", devices.problem, bad, "torch cannot be asked: run `python -m fleuve.doctor.probe devices`"
        )
    if not devices.gpus:
        found = "none" if devices.cuda else "none (torch is built for CPUs)"
        if needs.gpus:
            how = "install the driver" if devices.cuda else "install a CUDA build of torch"
            return Finding("GPUs", found, "fail", f'device = "cuda" needs one: {how}')
        return Finding("GPUs", found)
    kinds = sorted({f"{gpu.name} {gpu.memory / 2**30:.0f} GiB" for gpu in devices.gpus})
    found = f"{len(devices.gpus)} × {', '.join(kinds)}; driver {devices.driver or 'unknown'}, CUDA {devices.cuda}"
    taken = [i for i, gpu in enumerate(devices.gpus) if gpu.free < 0.9 * gpu.memory]
    if taken:
        least = min(devices.gpus[i].free / 2**30 for i in taken)
        who = ", ".join(map(str, taken))
        return Finding("GPUs", found, "warn", f"others use GPU {who} ({least:.0f} GiB free): `nvidia-smi` names them")
    if len(kinds) > 1:
        return Finding("GPUs", found, "warn", "of different kinds: the slowest sets the pace of the trainer's ranks")
    return Finding("GPUs", found)


def peers(facts: NodeFacts, needs: Needs) -> Finding | None:
    if len(facts.devices.gpus) < 2:
        return None
    if facts.devices.no_peers:
        pairs = ", ".join(f"{a}→{b}" for a, b in facts.devices.no_peers[:4])
        how = "NCCL goes through host memory: slower; in a virtual machine, ask for GPUs with NVLink or peer-to-peer on"
        return Finding("peer access", f"missing: {pairs}", "warn", how)
    return Finding("peer access", "all pairs")


def gloo(facts: NodeFacts, needs: Needs) -> Finding | None:
    return None if facts.gloo is None else _reduced("gloo", facts.gloo, needs.ranks > 1, SLOW_GLOO)


def nccl(facts: NodeFacts, needs: Needs) -> Finding | None:
    return None if facts.nccl is None else _reduced("NCCL", facts.nccl, needs.ranks > 1, 0.1)


def _reduced(name: str, reduced: Reduced, needed: bool, slow: float) -> Finding:
    if reduced.problem:
        how = "NCCL_DEBUG=INFO says more" if name == "NCCL" else "name the interface in GLOO_SOCKET_IFNAME"
        return Finding(name, reduced.problem, "fail" if needed else "warn", f"ranks cannot work together: {how}")
    words = f"4 MB over {reduced.ranks} ranks in {1000 * reduced.seconds:.1f} ms"
    if reduced.seconds > slow:
        return Finding(name, words, "warn", "slow: is the machine busy?")
    return Finding(name, words)


def loopback(facts: NodeFacts, needs: Needs) -> Finding:
    if facts.loopback:
        return Finding(
            "loopback", facts.loopback, "fail", "processes speak over 127.0.0.1: allow it, `ip link set lo up`"
        )
    return Finding("loopback", "answers")


def shared(facts: NodeFacts, needs: Needs) -> Finding:
    """Weights are published there, `weights.keep` versions and the one that is being written."""
    words = f"{_size(facts.shared_free)} free in {facts.shared_place}"
    if needs.weights is None:
        if facts.shared_free < 2**28:
            return Finding("shared memory", words, "warn", "little for weights: in a container, give --shm-size=16g")
        return Finding("shared memory", words)
    need = needs.weights * needs.weights_kept
    words += f", {_size(need)} needed"
    if facts.shared_free < need:
        how = 'in a container, give --shm-size; or weights.transport = "path" with a directory on a fast disk'
        return Finding("shared memory", words, "fail", how)
    return Finding("shared memory", words)


def disk(facts: NodeFacts, needs: Needs) -> Finding:
    """Checkpoints go there, `checkpoint.keep` of them and the one that is being written."""
    words = f"{_size(facts.disk_free)} free in {facts.disk_place}"
    if needs.checkpoint is None:
        return Finding("disk", words)
    need = needs.checkpoint * needs.checkpoints_kept
    words += f", {_size(need)} needed"
    if facts.disk_free < needs.checkpoint:
        return Finding("disk", words, "fail", "not one checkpoint fits: another run_dir")
    if facts.disk_free < need:
        return Finding("disk", words, "warn", "checkpoint.keep = 1, or another run_dir")
    return Finding("disk", words)


def open_files(facts: NodeFacts, needs: Needs) -> Finding:
    limit = facts.open_files
    words = f"{'unlimited' if limit < 0 else limit}, {needs.open_files} needed"
    if 0 <= limit < needs.open_files:
        return Finding(
            "open files", words, "fail", f"each answer in flight is a connection: ulimit -Hn {needs.open_files}"
        )
    return Finding("open files", words)


def huge_pages(facts: NodeFacts, needs: Needs) -> Finding:
    words = facts.huge_pages or "none"
    if facts.huge_pages == "never" and needs.bf16 and not facts.devices.gpus:
        how = "bf16 is faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", words, "warn", how)
    return Finding("huge pages", words)


def sandbox(facts: NodeFacts, needs: Needs) -> Finding | None:
    if facts.sandbox is None:
        return None
    if facts.sandbox:
        if needs.sandbox is None:
            return Finding("sandbox", facts.sandbox, "warn", "of concern to the verifier `code` alone")
        if needs.weak_sandbox:
            return Finding("sandbox", "resource limits alone", "warn", "programs can do what this user can")
        return Finding(
            "sandbox", facts.sandbox, "fail", "sysctl kernel.unprivileged_userns_clone=1, or a reward service"
        )
    return Finding("sandbox", "user namespaces can be had")


def clock(facts: NodeFacts, needs: Needs) -> Finding:
    if facts.clock:
        return Finding("clock", facts.clock, "fail", "every deadline hangs on it: another clock source of the kernel")
    return Finding("clock", "monotonic")


def skew(seconds: float, uncertain: float) -> Finding:
    """How far a node's clock is from this one's, give or take `uncertain`."""
    words = f"{seconds:+.3f} s (± {uncertain:.3f})"
    if abs(seconds) - uncertain > SKEW:
        return Finding("clock skew", words, "warn", "times in logs do not fit together: start NTP")
    return Finding("clock skew", words)


def niceness(value: int) -> Finding:
    """At which priority Ray runs what it starts on a node."""
    if value > 0:
        how = "RAY_worker_niceness=0 before `ray start`, else everything else on the node comes first"
        return Finding("priority", f"niceness {value}", "warn", how)
    return Finding("priority", f"niceness {value}")


def ray_token(mode: int | None, enabled: bool) -> Finding:
    """Who can run code on the cluster. `mode` of the token's file; None: there is none."""
    if not enabled:
        how = "whoever reaches the head node runs code there: RAY_AUTH_MODE=token, or a network of its own"
        return Finding("Ray token", "off", "warn", how)
    if mode is not None and mode & 0o044:
        return Finding(
            "Ray token", f"on, its file has mode {mode:04o}", "warn", "others read it: chmod 600 ~/.ray/auth_token"
        )
    return Finding("Ray token", "on")


def sees(run: bool, weights: bool) -> Finding:
    """Whether a node sees the directories of the node that the run is started on."""
    if run:
        return Finding("shared files", "sees the run directory" + ("" if weights else "; weights come over HTTP"))
    return Finding("shared files", "does not see the run directory: rollout workers only; weights come over HTTP")


CHECKS: Sequence[Check] = (
    python,
    torch,
    transformers,
    ray,
    cores,
    instructions,
    gpus,
    peers,
    nccl,
    gloo,
    loopback,
    shared,
    disk,
    open_files,
    huge_pages,
    sandbox,
    clock,
)


def judge(facts: NodeFacts, needs: Needs) -> list[Finding]:
    """Every check of one node."""
    return [finding for check in CHECKS if (finding := check(facts, needs)) is not None]


def _numbers(version: str) -> tuple[int, int]:
    """Major and minor: `2.13.0+cpu` is (2, 13)."""
    found = [int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:2]]
    major, minor = [*found, 0, 0][:2]
    return major, minor


def _size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
