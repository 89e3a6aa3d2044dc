"""Opening a Hugging Face model directory for Fleuve: the model, on our attention function."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fleuve.config.models import resolve_model
from fleuve.modeling.attention import NAME


def load_model(path: str, dtype: torch.dtype, device: str = "cpu") -> torch.nn.Module:
    """The decoder in evaluation mode, its attention routed to `fleuve_attention` (see `modeling.attention`)."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        resolve_model(path), dtype=dtype, attn_implementation=NAME
    )
    return model.to(device).eval()


def build_model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A randomly initialised decoder of the architecture that `config["model_type"]` names."""
    fields = {k: v for k, v in config.items() if k != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(hf_config, attn_implementation=NAME)
    return model.to(dtype)
