"""Mathematics and programs in one evaluation, here and through a service; what stays of one that is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_model import save_tiny_model

from fleuve.config.settings import RewardSettings
from fleuve.data.open import load_prompts
from fleuve.errors import UserError
from fleuve.evaluate.command import EvalSettings, eval_settings, run_eval, table
from fleuve.evaluate.evaluate import evaluate
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.rewards.open import open_rewarder
from fleuve.types import Completion, GenerationRequest, SamplingParams, Verdict

ROOT = Path(__file__).parents[2]
MBPP = ROOT.parent / "shared" / "data" / "mbpp.jsonl"
PAGE = ROOT / "docs" / "evaluation.md"
ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2?", "answer": "4"},
    {"prompt": "f doubles", "tests": ["assert f(2) == 4"], "verifier": "code"},
    {"prompt": "print the sum", "cases": [{"input": "1 2", "output": "3"}], "verifier": "code"},
    {"prompt": "f of f", "tests": ["assert f(lambda: 1) == 1"], "verifier": "code"},
]
SAYS = {
    "2+2?": [r"\boxed{4}", "5"],
    "f doubles": ["def f(x): return 2 * x", "def f(x): return x"],
    "print the sum": ["```python\nprint(sum(map(int, input().split())))\n```", "import os\nos._exit(0)"],
    "f of f": ["def f(x): return 1"] * 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=4096)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write(tmp_path / "mixed.jsonl", ROWS)


@pytest.fixture
def service() -> Iterator[str]:
    """`fleuve rewards serve` with the verifier `code`: its URL."""
    command = [sys.executable, "-m", "fleuve", "rewards", "serve", "--port", "0", "--verifier", "code"]
    process = subprocess.Popen([*command, "--reward.deadline", "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"http://\S+", line)
    try:
        assert match, line
        yield match[0]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


async def _scores(mixed: Path, model: Path, reward: RewardSettings, output: Path) -> dict[str, list[Verdict]]:
    """Real verifiers, on an engine that says `SAYS`."""
    settings = eval_settings(str(model), str(mixed), {})
    prompts = load_prompts(str(mixed), settings.data, load_tokenizer(str(model)), None)
    by_ids = {tuple(prompt.input_ids): prompt.text for prompt in prompts}

    async def generate(request: GenerationRequest) -> Completion:
        text = SAYS[by_ids[tuple(request.input_ids)]][int(request.request_id.rpartition("/")[2])]
        ids = [ord(c) for c in text]
        none = [0.0] * len(ids)
        return Completion(request_id="", output_ids=ids, logprobs=none, versions=[0] * len(ids), finish_reason="stop")

    async with open_rewarder(reward, [prompt.verifier for prompt in prompts]) as rewards:
        result = await evaluate(
            generate,
            rewards,
            lambda ids: "".join(map(chr, ids)),
            prompts,
            SamplingParams(max_new_tokens=100),
            samples=2,
            output=output,
        )
    assert (result.accuracy, result.no_verdict, result.pass_at[2]) == (0.5, 2, 1.0)
    assert {label: (p.problems, p.accuracy, p.no_verdict) for label, p in result.parts.items()} == {
        "verifier=code": (3, 0.5, 2),
        "verifier=math": (1, 0.5, 0),
    }
    text = table(result, settings)
    assert "no verdict   2 answers, left out of the above; the first: verifier 'code' raised" in text
    assert re.search(r"verifier=math\s+1 problems   accuracy 0.500 .*pass@2 1.000", text)
    lines = [json.loads(line) for line in output.read_text().splitlines()]  # noqa: ASYNC240
    found: dict[str, list[Verdict]] = {}
    for line in sorted(lines, key=lambda line: line["sample"]):
        found.setdefault(line["prompt"], []).append(line["score"])
    return found


async def test_each_row_is_scored_by_the_verifier_that_it_names(mixed: Path, model: Path, tmp_path: Path) -> None:
    scores = await _scores(mixed, model, RewardSettings(deadline=60.0), tmp_path / "answers.jsonl")
    assert scores == {"2+2?": [1, 0], "f doubles": [1, 0], "print the sum": [1, 0], "f of f": [None, None]}


async def test_a_service_elsewhere_gives_the_same(mixed: Path, model: Path, tmp_path: Path, service: str) -> None:
    scores = await _scores(mixed, model, RewardSettings(url=service), tmp_path / "answers.jsonl")
    assert scores == {"2+2?": [1, 0], "f doubles": [1, 0], "print the sum": [1, 0], "f of f": [None, None]}
    settings = eval_settings(str(model), str(mixed), {}, ["--reward.url", service, "--data.verifier", "no.such:f"])
    with pytest.raises(UserError, match=rf"reward.url = {service}: the service has no verifier 'no.such:f'"):
        run_eval(settings)


def documented_commands() -> dict[str, list[str]]:
    """The commands on the page, as a shell reads them, by the file that they evaluate."""
    found = {}
    for block in re.findall(r"```\n(fleuve eval MODEL .*?)\n```\n", PAGE.read_text(), re.DOTALL):
        said = subprocess.run(["bash", "-c", f"printf '%s\\0' {block}"], capture_output=True, text=True, check=True)
        words = said.stdout.split("\0")[:-1]
        found[words[3]] = words[4:]
    return found


HUMAN_EVAL: dict[str, Any] = {
    "task_id": "HumanEval/0",
    "prompt": 'def half(x):\n    """Half of it."""\n',
    "canonical_solution": "    return x / 2\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
    "entry_point": "half",
}


def documented(name: str, model: Path, tmp_path: Path) -> tuple[EvalSettings, str, str]:
    """Settings of a documented command for the first rows of its file; what the first prompt shows, and its answer."""
    if name == "mbpp.jsonl":
        if not MBPP.exists():
            pytest.skip("no MBPP here")
        rows = [json.loads(line) for line in MBPP.read_text(encoding="utf-8").splitlines()[:3]]
        seen, solution = rows[0]["test_list"][2], rows[0]["code"]
    else:
        rows, seen, solution = [HUMAN_EVAL], "```python\ndef half(x):", HUMAN_EVAL["canonical_solution"]
    data, output = write(tmp_path / name, rows), str(tmp_path / "answers.jsonl")
    # A random model of ours has no chat template, and is not asked for long answers here.
    small = ["--data.template", "none", "--samples", "2", "--rollout.max_new_tokens", "8", "--reward.deadline", "60"]
    settings = eval_settings(str(model), str(data), {}, [*documented_commands()[name], *small, "--output", output])
    return settings, seen, solution


@pytest.mark.parametrize("name", ["mbpp.jsonl", "HumanEval.jsonl"])
async def test_the_documented_commands_show_what_is_asked_and_score_it(name: str, model: Path, tmp_path: Path) -> None:
    settings, seen, solution = documented(name, model, tmp_path)
    prompts = load_prompts(settings.data.train, settings.data, load_tokenizer(str(model)), None)
    assert seen in prompts[0].text
    assert prompts[0].answer == solution
    async with open_rewarder(settings.reward, ["code"]) as rewards:
        assert (await rewards.score(prompts[0], solution)).score == 1.0
        assert (await rewards.score(prompts[0], "    pass")).score == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mbpp.jsonl", "HumanEval.jsonl"])
def test_the_documented_commands_run(name: str, model: Path, tmp_path: Path) -> None:
    settings, _, _ = documented(name, model, tmp_path)
    result = run_eval(settings)
    assert (result.no_verdict, result.accuracy) == (0, 0.0)


def test_the_documented_stop_strings_are_read() -> None:
    (stop,) = re.findall(r"`--rollout\.stop '(.*)'`", PAGE.read_text())
    settings = eval_settings("M", "D", {}, ["--rollout.stop", stop])
    assert settings.rollout.stop == ("\ndef ", "\nclass ", "\nif ", "\nprint")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_evaluation_that_is_interrupted_leaves_what_was_scored(
    number: signal.Signals, status: int, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    data = write(tmp_path / "many.jsonl", [{"prompt": f"{i}?", "answer": "1"} for i in range(5000)])
    flags = f"--output {output} --rollout.max_new_tokens 20 --rollout.threads 1 --rollout.max_running 4".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "fleuve", "eval", str(model), str(data), *flags],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 120.0
    while not (output.exists() and output.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    if number == signal.SIGINT:
        assert f"interrupted; the answers scored so far are in {output}" in errors.decode()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    content = output.read_text()
    assert content.endswith("\n")
    lines = [json.loads(line) for line in content.splitlines()]
    assert 5 <= len(lines) < 5000
    assert all(line["score"] in (0.0, 1.0) for line in lines)
