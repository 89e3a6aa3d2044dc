"""A decoder whose weights are shared out to all ranks (FSDP2): each holds some rows of every matrix, in fp32.

A layer's weights are gathered just before it computes, in the dtype that it computes in, and let go after. Gradients
are added up over the ranks, in fp32, not averaged: the loss's denominators are those of the whole minibatch already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fleuve.config.models import resolve_model
from fleuve.errors import UserError
from fleuve.modeling.attention import NAME
from fleuve.modeling.forward import base_model
from fleuve.modeling.loading import load_model
from fleuve.train.ranks import Ranks, rows_of

T = TypeVar("T")


class Root(nn.Module):
    """The outermost module. What is computed inside one call of it finds embeddings, final norm and output head
    gathered, during the backward pass too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """`compute` of the model; tensors that it returns may carry gradient."""
        return compute(self.model)


class ShardedModel:
    """A decoder opened from `path` on all ranks of `mesh`, this rank's share of it on its device.

    Rank 0 alone reads the weights; the others get their rows of one parameter after another, so that no host and no
    device ever holds more than one whole copy.

    Args:
        dtype: what it computes in. The share is fp32.
        offload: keep the share in host memory while it is not needed (CUDA only).
        trained: False for a frozen model, whose share is in `dtype`.

    Raises:
        UserError: as `load_model`; or there are no layers to be found in it.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        ranks: Ranks,
        mesh: DeviceMesh,
        *,
        offload: bool = False,
        trained: bool = True,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.ranks = ranks
        stored = torch.float32 if trained else dtype
        # What is wrong with the directory, the others hear of as rank 0 does: it is the one that looks.
        whole, problem = None, ""
        if ranks.leads:
            try:
                whole = load_model(path, stored)
            except UserError as error:
                problem = str(error)
        if problem := ranks.first_word(problem):
            raise UserError(problem)
        self.model = skeleton(path, stored)
        if whole is not None:
            self.model.generation_config = whole.generation_config
        self.root = Root(self.model)
        lower = dtype if dtype != torch.float32 and trained else None
        policies: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        for layer in decoder_layers(self.model):
            fully_shard(layer, reshard_after_forward=True, **policies)
        fully_shard(self.root, reshard_after_forward=False, **policies)
        for module in self._modules():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if ranks.context > 1:  # one without a target among its tokens has no use for the output head
                module.set_reduce_scatter_unused_params(True)
        self.root.to_empty(device="cpu" if offload else mesh.device_type)
        if not trained:
            self.root.requires_grad_(False)
        self.parameters: dict[str, DTensor] = {n: p for n, p in self.model.named_parameters() if isinstance(p, DTensor)}
        """This rank's shares, by the model's own names; each tied weight once."""
        _hand_out(whole, self.model, self.parameters, mesh.device_type)

    def __call__(self, compute: Callable[[nn.Module], T]) -> T:
        """One forward pass, by all ranks together."""
        result: T = self.root(compute)
        return result

    def refresh(self) -> None:
        """To be called when shares have changed: nothing that was gathered before is used again."""
        for module in self._modules():
            module.reshard()

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters in `dtype`, one after the other, gathered on each rank's device. By all ranks together."""
        for name, parameter in self.parameters.items():
            share = parameter.to_local().detach()
            if share.device.type != parameter.device_mesh.device_type:  # offloaded
                share = share.to(parameter.device_mesh.device_type)
            part = DTensor.from_local(
                share.to(dtype),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            yield name, part.full_tensor()

    def _modules(self) -> Iterator[FSDPModule]:
        return (module for module in self.root.modules() if isinstance(module, FSDPModule))


def skeleton(path: str, dtype: torch.dtype) -> Any:
    """The decoder in `path` without weights, on torch's `meta` device."""
    config = AutoConfig.from_pretrained(resolve_model(path), trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False)
    return model.eval()


def with_weights(model: ShardedModel, weights: dict[str, Tensor]) -> Any:
    """A plain model to be saved, of whole `weights`, which it does not copy."""
    plain = skeleton(model.path, model.dtype)
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    plain.generation_config = model.model.generation_config
    return plain


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers, each of which is gathered by itself.

    Raises:
        UserError: there are none.
    """
    layers = getattr(base_model(model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise UserError(
            f"trainer.ranks: {type(model).__name__} has no list of layers to share out; train it with trainer.ranks = 1"
        )
    return layers


@torch.no_grad()
def _hand_out(whole: nn.Module | None, model: nn.Module, parameters: dict[str, DTensor], device: str) -> None:
    """Fill this rank's shares, and what is not shared out, from rank 0's `whole` model."""
    theirs = dict(whole.named_parameters()) if whole is not None else {}
    for name, parameter in parameters.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if whole is not None:
            full.copy_(theirs[name])
        dist.broadcast(full, src=0)
        share = parameter.to_local()
        mesh = parameter.device_mesh
        rows = rows_of(parameter.shape[0], mesh.get_local_rank(), mesh.size())
        share.copy_(full[rows])
    sources = dict(whole.named_modules()) if whole is not None else {}
    for name, module in model.named_modules():
        origin = sources.get(name)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = _from_first(None if origin is None else origin._buffers[key], buffer, device)
        for key, value in vars(module).items():  # what a model keeps beside its buffers, such as original frequencies
            if isinstance(value, Tensor):
                setattr(module, key, _from_first(None if origin is None else getattr(origin, key), value, device))


def _from_first(source: Tensor | None, like: Tensor, device: str) -> Tensor:
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if source is not None:
        made.copy_(source)
    dist.broadcast(made, src=0)
    return made


def width_and_size(model: nn.Module) -> tuple[int, int, int]:
    """What `SequenceCost.of` asks: parameters that tokens are multiplied with, layers, and heads · head_dim."""
    config: Any = model.config
    heads = int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    total = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    inputs = model.get_input_embeddings().weight  # type: ignore[operator]
    untied = inputs is not model.get_output_embeddings().weight  # type: ignore[operator]
    return total - (inputs.numel() if untied else 0), int(config.num_hidden_layers), heads * head
