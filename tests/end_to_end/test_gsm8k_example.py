"""`examples/gsm8k.toml` as it stands, but for a tiny random model, the CPU and fewer answers."""

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, Run, environment

from fleuve.modeling.char_tokenizer import build_char_tokenizer
from fleuve.modeling.loading import build_model

DATA = ROOT.parent / "shared" / "data"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A chat model of two layers that knows nothing."""
    tokenizer = build_char_tokenizer("".join(c for c in string.printable if c not in "\x0b\x0c\r"))
    tokenizer.chat_template = TEMPLATE
    model = build_model(
        {
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 4096,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        }
    )
    path = tmp_path / "tiny"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
def test_the_gsm8k_example_trains_on_its_rows(tmp_path, tiny):
    if not (DATA / "gsm8k_train.jsonl").exists():
        pytest.skip("gsm8k_train.jsonl is not on this machine (it stays outside the repository)")
    flags = ["--run_dir", str(tmp_path / "run"), "--steps", "2", "--model.path", str(tiny)]
    flags += ["--data.train", str(DATA / "gsm8k_train.jsonl"), "--data.eval", str(DATA / "gsm8k_test.jsonl")]
    flags += ["--rollout.device", "cpu", "--rollout.max_new_tokens", "32", "--rollout.kv_cache_tokens", "65536"]
    flags += ["--rollout.group_size", "4", "--control.batch_size", "4", "--trainer.minibatches", "2"]
    flags += ["--trainer.device", "cpu", "--evaluate.every", "0"]
    for command in ("check", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "fleuve", command, str(ROOT / "examples" / "gsm8k.toml"), *flags],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    run = Run(done.returncode, done.stdout, tmp_path / "run")
    assert [row["step"] for row in run.metrics] == [1, 2]
    questions = {json.loads(line)["question"] for line in (DATA / "gsm8k_train.jsonl").read_text().splitlines()}
    prompts = {group["prompt"] for _, group, _ in run.answers}
    assert prompts
    assert all(any(question in prompt for question in questions) for prompt in prompts)
    assert all("#### " in group["answer"] for _, group, _ in run.answers)
