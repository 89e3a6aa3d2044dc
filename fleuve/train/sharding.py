"""A decoder whose weights are shared out to all ranks (FSDP2): each holds some rows of every matrix, in fp32.

A layer's weights are gathered just before it computes, in the dtype that it computes in, and let go after; where ranks
compute layers together (`train.tensor`), this rank's part of them. Gradients are added up over the ranks, in fp32, not
averaged: the loss's denominators are those of the whole minibatch already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from fleuve.config.models import resolve_model
from fleuve.errors import UserError
from fleuve.modeling.attention import NAME
from fleuve.modeling.forward import base_model
from fleuve.modeling.loading import load_model
from fleuve.train.layout import Layout
from fleuve.train.logprobs import TokenLogprobs, token_logprobs
from fleuve.train.ranks import RankGroup
from fleuve.train.tensor import TensorParallel

T = TypeVar("T")


class Root(nn.Module):
    """The outermost module. What is computed inside one call of it finds embeddings, final norm and output head
    gathered, during the backward pass too; their gradients add up in fp32, of however many chunks the output head has
    (`train.logprobs`)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        inside = set(decoder_layers(model).modules())
        self._around = [module for module in model.modules() if module not in inside]

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """`compute` of the model; tensors that it returns may carry gradient."""
        for module in self._around:
            for parameter in module.parameters(recurse=False):
                parameter.grad_dtype = torch.float32
        return compute(self.model)


class ShardedModel:
    """A decoder opened from `path` on all ranks, this rank's share of it on its device.

    Rank 0 alone reads the weights; the others get their parts of one parameter after another, so that no host and no
    device ever holds more than one whole copy.

    Args:
        dtype: what it computes in. The share is fp32.
        offload: keep the share in host memory while it is not needed (CUDA only).
        trained: False for a frozen model, whose share is in `dtype`.

    Raises:
        UserError: as `load_model`; or there are no layers to be found in it, or they cannot be split.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        ranks: RankGroup,
        device: str,
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
        layers = decoder_layers(self.model)
        everyone = mesh_of(ranks, device)
        self._tensor = TensorParallel(ranks, device) if ranks.tensor > 1 else None
        self.width_and_size = width_and_size(self.model)
        """Of the whole model; see there."""
        self._shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        split = self._tensor.split(self.model) if self._tensor else {}
        self.layout = Layout(ranks.count, ranks.tensor, split)
        self.token_logprobs: TokenLogprobs = self._tensor.logprobs if self._tensor else token_logprobs
        lower = dtype if dtype != torch.float32 and trained else None
        policies: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        columns = self._tensor.shards if self._tensor else everyone
        for layer in layers:
            fully_shard(layer, mesh=columns, reshard_after_forward=True, **policies)
        fully_shard(self.root, mesh=everyone, reshard_after_forward=False, **policies)
        for module in self._modules():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.root.to_empty(device="cpu" if offload else device)
        if not trained:
            self.root.requires_grad_(False)
        self.parameters: dict[str, DTensor] = {n: p for n, p in self.model.named_parameters() if isinstance(p, DTensor)}
        """This rank's shares, by the model's own names; each tied weight once."""
        self._hand_out(whole, device)

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
            whole = _joined(share.to(dtype), parameter.device_mesh, 0, parameter.shape)
            cut = self.layout.split.get(name)
            if self._tensor is not None and cut is not None:
                whole = _joined(whole, self._tensor.tensors, cut, self._shapes[name])
            yield name, whole

    def gradient(self, name: str) -> Tensor | None:
        """This rank's share of the gradient of a parameter. By all ranks together."""
        gradient = self.parameters[name].grad
        if gradient is None:
            return None
        share: Tensor = gradient.to_local()  # type: ignore[attr-defined]
        return share if self._tensor is None else self._tensor.gradient(name, share)

    @torch.no_grad()
    def _hand_out(self, whole: nn.Module | None, device: str) -> None:
        """Fill this rank's shares, and what is not shared out, from rank 0's `whole` model."""
        theirs = dict(whole.named_parameters()) if whole is not None else {}
        for name, parameter in self.parameters.items():
            full = torch.empty(self._shapes[name], dtype=parameter.dtype, device=device)
            if whole is not None:
                full.copy_(theirs[name])
            dist.broadcast(full, src=0)
            parameter.to_local().copy_(full[self.layout.box(name, full.shape, self.ranks.rank)])
        _hand_out_buffers(whole, self.model, device)

    def _modules(self) -> Iterator[FSDPModule]:
        return (module for module in self.root.modules() if isinstance(module, FSDPModule))


def mesh_of(ranks: RankGroup, device: str) -> DeviceMesh:
    """All ranks in one row, on devices of their own."""
    return init_device_mesh(device, (ranks.count,))


def _joined(part: Tensor, mesh: DeviceMesh, dimension: int, shape: Sequence[int]) -> Tensor:
    """The whole of `shape`, of which all of `mesh` hold parts along one dimension."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    placed = DTensor.from_local(
        part, mesh, (Shard(dimension),), run_check=False, shape=torch.Size(shape), stride=stride
    )
    return placed.full_tensor()


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


def _hand_out_buffers(whole: nn.Module | None, model: nn.Module, device: str) -> None:
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
