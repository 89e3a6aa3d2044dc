"""Whole training runs with vLLM servers, updates in flight; every recorded log-probability is scored again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from whole_runs import ROOT, Run, train

pytestmark = pytest.mark.vllm

SMALL = """
run_dir = "x"
steps = 10
seed = 1
[model]
path = "builtin:small"
[data]
train = "procedural:chain"
[rollout]
engine = "vllm"
workers = 2
group_size = 4
max_new_tokens = 160
kv_cache_tokens = 8192
update_timeout = 300.0
health_timeout = 60.0
[control]
batch_size = 4
max_staleness = 2
[trainer]
learning_rate = 1e-3
"""

SMOLLM2 = """
run_dir = "x"
steps = 10
seed = 0
[model]
path = "models/smollm2"
[data]
train = "procedural:numeral"
template = "chat"
system_prompt = "You write numbers in digits."
[rollout]
engine = "vllm"
workers = 2
group_size = 4
max_new_tokens = 24
kv_cache_tokens = 4096
update_timeout = 300.0
health_timeout = 60.0
[control]
batch_size = 2
max_staleness = 2
[trainer]
minibatches = 1
token_budget = 2048
learning_rate = 1e-5
"""


def true_to_every_version(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten steps, answers of several versions among them, each token as its version's weights have it."""
    assert [row["step"] for row in run.metrics] == list(range(1, 11))
    mixed = sum(len(set(answer["versions"])) > 1 for _, answer in run.answers)
    difference = run.differences()
    staleness = max(row["staleness/max"] for row in run.metrics)
    with capsys.disabled():
        print(
            f"\n{run.model}: {len(run.answers)} answers, {mixed} of several versions, {len(difference)} tokens: "
            f"mean |difference| {difference.mean():.3g}, largest {difference.max():.3g}; staleness at most {staleness}"
        )
    assert difference.mean() < 1e-3
    assert mixed > 0, "no update met an answer in flight: nothing was shown"
    assert staleness <= 2
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(run.directory) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.parametrize("versions", ["spans", "pieces"])
def test_two_servers_train_the_small_model_and_every_token_is_of_its_version(tmp_path, versions, capsys) -> None:
    run = train(tmp_path, SMALL, "builtin:small", "--rollout.vllm.versions", versions, timeout=1500)
    true_to_every_version(run, capsys)
    own = [row["mismatch/logprob_abs_mean"] for row in run.metrics if "mismatch/logprob_abs_mean" in row]
    assert own, "no step trained a token of its own version"
    assert np.mean(own) < 1e-3


def test_adapters_are_merged_and_every_token_is_of_its_version(tmp_path, capsys) -> None:
    lora = ("--lora.rank", "8", "--trainer.learning_rate", "2e-2")
    run = train(tmp_path, SMALL, "builtin:small", *lora, timeout=1500)
    true_to_every_version(run, capsys)
    assert max(path.stat().st_size for path in run.weights.values()) < 400_000  # of 2.7 MB


def test_a_server_that_is_killed_costs_no_answer_and_no_truth(tmp_path, capsys) -> None:
    """The other one goes on with its answers; it is started again beside that."""

    def kill_one() -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            time.sleep(0.1)
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "fleuve_vllm.serve" in line and "worker-1" in line and str(tmp_path) in str(process.environ()):
                process.kill()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    run = train(tmp_path, SMALL, "builtin:small", timeout=1500)
    killer.join(timeout=1)
    true_to_every_version(run, capsys)
    assert "worker-1 is given up" in run.output


@pytest.mark.slow
@pytest.mark.skipif(not Path(ROOT, "models/smollm2/config.json").exists(), reason="fleuve fetch smollm2 makes it")
def test_two_servers_train_smollm2_and_every_token_is_of_its_version(tmp_path, capsys) -> None:
    true_to_every_version(train(tmp_path, SMOLLM2, "models/smollm2", timeout=3000), capsys)
