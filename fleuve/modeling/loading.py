"""Opening a Hugging Face model directory for Fleuve: the model, on our attention function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from fleuve.config.models import resolve_model
from fleuve.config.weight_files import refuse_pickle
from fleuve.errors import UserError
from fleuve.modeling.attention import NAME

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(wish: str) -> str:
    """`auto` is CUDA where there is one.

    Raises:
        UserError: `cuda` is asked for, and there is none.
    """
    cuda = torch.cuda.is_available()
    if wish == "cuda" and not cuda:
        raise UserError('device "cuda" is asked for, but torch finds no GPU: use device "cpu" or "auto"')
    return "cuda" if cuda and wish != "cpu" else "cpu"


def load_model(path: str, dtype: torch.dtype, device: str = "cpu") -> torch.nn.Module:
    """The decoder in evaluation mode, its attention routed to `fleuve_attention` (see `modeling.attention`). Opening it
    runs no code of the directory's: its weights are safetensors, its architecture one that transformers knows.

    Raises:
        UserError: there is no model in `path`, a file of it cannot be read, or its weights are not all that its
            configuration asks for (transformers would make up the rest at random).
    """
    source = resolve_model(path)
    _check_files(Path(source))
    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation=NAME,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # no code of ours runs in there, and what a broken directory raises can be anything
        reason = " ".join((str(error).strip() or type(error).__name__).split("\n")[:2])
        raise UserError(f"cannot open the model {source}: {' '.join(reason.split())}") from error
    faults = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    faults += [
        f"{name} is {tuple(got)} instead of {tuple(want)}" for name, got, want in sorted(info["mismatched_keys"])
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UserError(f"the weights in {source} do not fit its config.json: {'; '.join(faults[:3])}{more}")
    loaded: torch.nn.Module = model
    return loaded.to(device).eval()


def build_model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A randomly initialised decoder of the architecture that `config["model_type"]` names."""
    fields = {k: v for k, v in config.items() if k != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(hf_config, attn_implementation=NAME)
    return model.to(dtype)


def _check_files(directory: Path) -> None:
    """Read the header of every weight file, which also says how long the file must be; a broken one is named, a pickle
    refused."""
    refuse_pickle(directory)
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{file} is broken or cut off: it cannot be read as safetensors: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its report of what fits: `load_model` says in one line what does not."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
