"""`examples/code.toml`: rewards are the sandbox's verdicts, and a model learns to program from them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import mean

import pytest
from runs import ROOT, Run, environment

from fleuve.config.settings import DataSettings
from fleuve.data.open import open_source
from fleuve.errors import UserError
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.verify import CodeVerifier

EXAMPLE = ROOT / "examples" / "code.toml"


def train_example(tmp_path: Path, *flags: str, timeout: float) -> Run:
    """The example with these flags; skips where no walls can be built for programs."""
    try:
        CodeVerifier(CodeOptions()).close()
    except UserError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-m", "fleuve", "train", str(EXAMPLE), "--run_dir", str(tmp_path / "run"), *flags],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Run(done.returncode, done.stdout + done.stderr, tmp_path / "run")


def test_rewards_are_what_the_sandbox_says_of_each_program(tmp_path: Path) -> None:
    flags = ["--steps", "3", "--rollout.group_size", "4", "--control.batch_size", "4", "--evaluate.every", "0"]
    run = train_example(tmp_path, *flags, timeout=240)
    assert run.code == 0, run.output
    assert "sandbox for programs: namespaces" in run.output
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert run.metrics[-1]["reward_service/checks"] >= 3 * 4 * 4
    assert run.metrics[-1]["reward_service/no_verdict"] == 0
    example = tomllib.loads(EXAMPLE.read_text())
    tokenizer = load_tokenizer(example["model"]["path"])
    prompts = open_source(example["data"]["train"], DataSettings(**example["data"]), tokenizer, example["seed"])
    verifier = CodeVerifier(CodeOptions(deadline=60.0))
    try:
        for _, group, answer in itertools.islice(run.answers, 0, None, 2):
            row = prompts.prompt(group["prompt_id"]).row
            assert row["prompt"] == group["prompt"]
            assert answer["reward"] == verifier(answer["text"], row), answer["text"]
    finally:
        verifier.close()
    assert {answer["reward"] for _, _, answer in run.answers} == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_whole_example_learns_to_program(tmp_path: Path, seed: int) -> None:
    run = train_example(tmp_path, "--seed", str(seed), timeout=1800)
    assert run.code == 0, run.output
    solved = [row["reward/solved"] for row in run.metrics]
    assert mean(solved[-10:]) - mean(solved[:10]) >= 0.2
    held_out = [row["eval/program/pass@1"] for row in run.metrics if "eval/program/pass@1" in row]
    assert held_out[-1] - held_out[0] >= 0.2, "on prompts that it never trained on too"
    assert run.metrics[-1]["reward_service/no_verdict"] == 0
