"""LoRA: the model stays as it was opened, and adapters beside its linear layers learn (Hu et al. 2021).

`peft` makes the layers and writes what other programs open. What a step teaches goes the way of all weights: masters in
fp32, AdamW over them. What is published are the adapters alone (`weights.adapters`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fleuve.config.lora import LoraSettings, require_peft, unknown_modules
from fleuve.errors import UserError
from fleuve.train.optimizer import MasterOptimizer
from fleuve.weights.adapters import WEIGHT, Adapter, merged, named

T = TypeVar("T")

NAME = "default"
"""peft's, of the only adapter that a layer has."""
_A, _B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
_BASE = ".base_layer."
"""In the names of what belongs to a layer itself, once it has an adapter."""


def add_adapters(model: nn.Module, lora: LoraSettings, seed: int) -> Any:
    """Give linear layers of `model` adapters, in fp32; nothing else of it has a gradient from here on. Each A is drawn
    by `seed`, the same on every device; each B is zero: the model computes what it did. Returns peft's configuration.

    Raises:
        UserError: `lora.modules` names what is no linear layer, the model has none, or peft is not installed.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = {
        name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
    }
    if not layers:
        raise UserError(f"lora.rank: {type(model).__name__} has no linear layers that could have adapters")
    if lines := unknown_modules(lora.modules, layers):
        raise UserError("\n".join(lines))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(set(lora.modules) or layers),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()
    return config


def without_adapters(model: nn.Module) -> Callable[[Callable[[nn.Module], T]], T]:
    """What computes something of `model` as it was before it had adapters; see `Policy`'s `around`."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    def around(compute: Callable[[nn.Module], T]) -> T:
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return compute(model)
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    return around


class AdapterOptimizer(MasterOptimizer):
    """Owns the adapters of `model`, which computes in `dtype`, as it was opened in.

    Args:
        config: peft's.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, config: Any, **adamw: Any) -> None:
        super().__init__(model, dtype, **adamw)
        self.model: Any = model
        self.dtype = dtype
        self.config = config

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The adapters as rollout workers get them, by the names of `weights.adapters`."""
        yield from named(self._adapters(dtype)).items()

    def save_pretrained(self, path: Path) -> None:
        """The Hugging Face directory of the whole model, adapters merged into it as workers merge them."""
        adapters = self._adapters(self.dtype)
        weights = {}
        for name, tensor in self.model.state_dict().items():
            if not name.endswith((_A, _B)):
                name = name.replace(_BASE, ".")
                weights[name] = merged(tensor, adapters[name]) if name in adapters else tensor
        self.model.save_pretrained(path, state_dict=weights)

    def save_adapter(self, path: Path, base: str) -> None:
        """A directory that `peft.PeftModel.from_pretrained` opens, with the adapters in fp32. `base` is the model that
        they belong to, as its configuration will name it."""
        path.mkdir()
        self.config.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
        self.config.target_modules = sorted(self.config.target_modules)
        self.config.save_pretrained(path)
        tensors = {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": master.detach().cpu().contiguous()
            for name, master in self.masters.items()
        }
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})

    def _adapters(self, dtype: torch.dtype) -> dict[str, Adapter]:
        """By the names of the matrices that they change."""
        found, scale = {}, self.config.lora_alpha / self.config.r
        for name, a in self.masters.items():
            if name.endswith(_A):
                stem = name.removesuffix(_A)
                b = self.masters[stem + _B]
                found[stem + WEIGHT] = Adapter(a.detach().to(dtype), (b.detach() * scale).to(dtype))
        return found
