"""What each check says of a node: facts in, verdict and advice out."""

from __future__ import annotations

import msgspec
import pytest

from fleuve.config.settings import Settings
from fleuve.doctor import verdicts
from fleuve.doctor.facts import NodeFacts, available_memory, chosen, cpu_features
from fleuve.doctor.needs import Needs, needs_of
from fleuve.doctor.probe import Devices, Gpu, Reduced

GIB = 2**30
H100 = Gpu("H100", 80 * GIB, 79 * GIB, (9, 0))
TWO_GPUS = Devices([H100, H100], "12.8", "550.54")

GOOD = NodeFacts(
    host="node",
    wall=0.0,
    python=(3, 11, 7),
    packages={"torch": "2.13.0+cpu", "transformers": "5.24.0", "ray": "2.60.0"},
    cpus=8,
    features=["avx512_bf16", "avx2"],
    niceness=0,
    memory=64 * GIB,
    open_files=2**20,
    shared_place="/dev/shm",
    shared_free=32 * GIB,
    disk_place="/runs",
    disk_free=900 * GIB,
    huge_pages="madvise",
    sandbox="",
    loopback="",
    clock="",
    devices=Devices(),
    gloo=Reduced(2, 0.01),
    nccl=None,
)
RUN = Needs(processes=4, weights=15 * GIB, weights_kept=2, checkpoint=90 * GIB, checkpoints_kept=3, sandbox="auto")


def facts(**changes: object) -> NodeFacts:
    return msgspec.structs.replace(GOOD, **changes)


def test_a_good_machine_has_nothing_to_be_mended():
    found = verdicts.judge(GOOD, RUN)
    assert [f for f in found if f.verdict != "ok" or f.advice] == []
    assert len(found) == len(verdicts.CHECKS) - 2, "no GPUs: neither peers nor NCCL"


@pytest.mark.parametrize(
    ("check", "changes", "needs", "verdict", "words"),
    [
        (verdicts.python, {"python": (3, 10, 4)}, RUN, "fail", "3.11"),
        (verdicts.python, {"python": (3, 15, 0)}, RUN, "warn", "tested up to"),
        (verdicts.torch, {"packages": {}}, RUN, "fail", "pip install"),
        (verdicts.torch, {"packages": {"torch": "2.8.1"}}, RUN, "fail", "2.9 or later"),
        (verdicts.torch, {"packages": {"torch": "2.14.0"}}, RUN, "warn", "tested from 2.9 to 2.13"),
        (verdicts.torch, {"packages": {"torch": "2.9.0+cu130"}}, RUN, "ok", ""),
        (verdicts.ray, {"packages": {}}, RUN, "ok", ""),
        (verdicts.ray, {"packages": {}}, Needs(ray=True), "fail", "ray[default]"),
        (verdicts.cores, {"cpus": 2}, RUN, "warn", "rollout.workers"),
        (verdicts.instructions, {"features": ["avx2"]}, Needs(bf16=True), "warn", "float32"),
        (verdicts.instructions, {"features": ["avx2"]}, Needs(bf16=False), "ok", ""),
        (verdicts.gpus, {}, Needs(gpus=True), "fail", "CUDA build of torch"),
        (verdicts.gpus, {"devices": Devices(cuda="12.8")}, Needs(gpus=True), "fail", "driver"),
        (verdicts.gpus, {"devices": Devices(problem="no end within 90 s")}, Needs(gpus=True), "fail", "probe devices"),
        (verdicts.gpus, {"devices": Devices(problem="no end within 90 s")}, Needs(), "warn", "probe devices"),
        (verdicts.gpus, {"devices": TWO_GPUS}, Needs(gpus=True), "ok", ""),
        (verdicts.gpus, {"devices": Devices([msgspec.structs.replace(H100, free=GIB)])}, RUN, "warn", "nvidia-smi"),
        (
            verdicts.gpus,
            {"devices": Devices([H100, Gpu("A100", 40 * GIB, 40 * GIB, (8, 0))])},
            RUN,
            "warn",
            "different kinds",
        ),
        (verdicts.peers, {"devices": Devices([H100, H100], no_peers=[(0, 1)])}, RUN, "warn", "host memory"),
        (verdicts.peers, {"devices": TWO_GPUS}, RUN, "ok", ""),
        (verdicts.nccl, {"nccl": Reduced(2, problem="unhandled cuda error")}, Needs(ranks=2), "fail", "NCCL_DEBUG"),
        (verdicts.nccl, {"nccl": Reduced(2, problem="unhandled cuda error")}, Needs(), "warn", "NCCL_DEBUG"),
        (verdicts.gloo, {"gloo": Reduced(2, problem="no end within 90 s")}, Needs(ranks=2), "fail", "GLOO_SOCKET"),
        (verdicts.gloo, {"gloo": Reduced(2, 3.0)}, Needs(ranks=2), "warn", "busy"),
        (verdicts.loopback, {"loopback": "Connection refused"}, RUN, "fail", "127.0.0.1"),
        (verdicts.shared, {"shared_free": 29 * GIB}, RUN, "fail", "--shm-size"),
        (verdicts.shared, {"shared_free": 2**26}, Needs(), "warn", "--shm-size"),
        (verdicts.disk, {"disk_free": 80 * GIB}, RUN, "fail", "not one checkpoint"),
        (verdicts.disk, {"disk_free": 200 * GIB}, RUN, "warn", "checkpoint.keep"),
        (verdicts.disk, {"disk_free": 0}, Needs(), "ok", ""),
        (verdicts.open_files, {"open_files": 1024}, RUN, "fail", "ulimit"),
        (verdicts.open_files, {"open_files": -1}, RUN, "ok", ""),
        (verdicts.huge_pages, {"huge_pages": "never"}, Needs(bf16=True), "warn", "madvise"),
        (verdicts.huge_pages, {"huge_pages": "never"}, Needs(bf16=False), "ok", ""),
        (verdicts.sandbox, {"sandbox": "no namespaces"}, RUN, "fail", "sysctl"),
        (verdicts.sandbox, {"sandbox": "no namespaces"}, Needs(), "warn", "code"),
        (verdicts.sandbox, {"sandbox": "none"}, Needs(sandbox="auto", weak_sandbox=True), "warn", "this user"),
        (verdicts.clock, {"clock": "goes back"}, RUN, "fail", "clock source"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(check, changes, needs, verdict, words):
    finding = check(facts(**changes), needs)
    assert finding.verdict == verdict, finding
    assert words in finding.advice
    assert bool(finding.advice) == (verdict != "ok"), "advice where it is of use, and nowhere else"


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (verdicts.skew(0.4, 0.01), "ok"),
        (verdicts.skew(-90.0, 0.01), "warn"),
        (verdicts.skew(3.0, 2.5), "ok"),
        (verdicts.niceness(15), "warn"),
        (verdicts.niceness(0), "ok"),
        (verdicts.ray_token(None, enabled=False), "warn"),
        (verdicts.ray_token(0o644, enabled=True), "warn"),
        (verdicts.ray_token(0o600, enabled=True), "ok"),
        (verdicts.sees(run=False, weights=False), "ok"),
    ],
)
def test_what_only_a_cluster_has(finding, verdict):
    assert finding.verdict == verdict


def test_what_a_run_needs_is_counted_from_its_settings():
    needs = needs_of(
        Settings.model_validate(
            {
                "run_dir": "r",
                "model": {"path": "qwen-7b"},
                "data": {"train": "t.jsonl", "verifier": "code"},
                "rollout": {"workers": 3, "group_size": 16, "device": "cpu"},
                "control": {"batch_size": 64, "max_staleness": 1},
                "trainer": {"dtype": "bfloat16", "device": "cpu"},
                "weights": {"keep": 2},
            }
        )
    )
    parameters = 7_615_616_512
    assert needs.weights == 2 * parameters
    assert needs.checkpoint == 14 * parameters
    assert needs.weights_kept == 3, "one is written while two are there"
    assert needs.processes == 4
    assert needs.open_files > 2 * 64 * 16
    assert (needs.gpus, needs.bf16, needs.sandbox) == (False, True, "auto")


def test_a_model_that_is_not_here_leaves_sizes_unknown():
    given = {"run_dir": "r", "model": {"path": "nobody/nothing"}, "data": {"train": "t.jsonl"}}
    assert needs_of(Settings.model_validate(given)).weights is None


def test_what_the_kernel_says_is_read():
    assert cpu_features("processor: 0\nflags\t\t: fpu avx2 amx_bf16 amx_tile\n\n") == ["amx_bf16", "avx2"]
    assert cpu_features("") == []
    assert available_memory("MemTotal: 9 kB\nMemAvailable:  2048 kB\n") == 2 * 2**20
    assert chosen("always [madvise] never\n") == "madvise"
    assert chosen("") == ""
