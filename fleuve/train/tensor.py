"""Tensor parallelism: several ranks compute every layer together, each with a part of its matrices.

Which matrix is cut along which dimension, transformers' plan for the architecture says (`base_model_tp_plan`). Queries,
keys and values are cut by heads, so each rank attends with heads of its own; what comes out of attention and of the MLP
is added up over the ranks, and so is, on the way back, the gradient of what goes in (Shoeybi et al. 2019, Megatron-LM).
Between layers all ranks of a group hold the same.

Embeddings, final norm and output head are not cut but shared out by FSDP over all ranks, and gradients are added up
over these. So each rank of a group may contribute its part of the gradient only. The output head is computed by each
for some of the tokens; what comes after the layers then has a gradient from these alone, which is added up over the
group before it enters the layers. What the embeddings get is the same on all ranks of the group: each contributes an
equal share.

Matrices are plain tensors, not torch's `parallelize_module`'s: a DTensor works out anew how to be cut for every number
of tokens that it has not seen, and every micro-batch has another.
"""

from __future__ import annotations

import re
import weakref
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from fleuve.errors import UserError
from fleuve.modeling.forward import base_model
from fleuve.train.gradient_scale import scale_gradient
from fleuve.train.logprobs import Head, token_logprobs
from fleuve.train.ranks import RankGroup
from fleuve.train.rows import whole_of

Style = Literal["colwise", "rowwise", "replicated_with_grad_allreduce"]
"""What a plan says of a module: its outputs are shared out, its inputs are, or (a norm of each head) neither is, and
each rank applies it to its own heads."""

_SIZES: dict[Style, str] = {"colwise": "out_features", "rowwise": "in_features"}
_DIMENSIONS: dict[Style, int] = {"colwise": 0, "rowwise": 1}


class TensorParallel:
    """The ranks that this one computes layers with, `tensors`: it is number `rank` of `count`. `shards` are the ranks
    that hold the same parts of layers."""

    def __init__(self, ranks: RankGroup, device: str) -> None:
        assert ranks.shards is not None
        assert ranks.tensors is not None
        self.count = ranks.tensor
        self.rank = ranks.rank % ranks.tensor
        self.group = ranks.tensors
        self.tensors = DeviceMesh.from_group(ranks.tensors, device)
        self.shards = DeviceMesh.from_group(ranks.shards, device)
        self._context = ranks.context
        self._summed: set[str] = set()

    def split(self, model: nn.Module) -> dict[str, int | None]:
        """Cut the layers of `model` (on the `meta` device), and have what is around them give its part of gradients.

        Returns:
            Of each parameter in a layer the dimension along which it is cut, None if it is not.

        Raises:
            UserError: as `plan_of`.
        """
        base, layers = base_model(model), f"{model.base_model_prefix}.layers."
        found: dict[str, int | None] = {n: None for n, _ in model.named_parameters() if n.startswith(layers)}
        entrances: dict[str, _Entrance] = {}
        for name, style in plan_of(model, self.count, self._context).items():
            module = base.get_submodule(name)
            for key, parameter in list(module.named_parameters(recurse=False)):
                whole = f"{model.base_model_prefix}.{name}.{key}"
                if style == "replicated_with_grad_allreduce":
                    self._summed.add(whole)
                elif parameter.ndim > _DIMENSIONS[style]:
                    found[whole] = cut = _DIMENSIONS[style]
                    shape = list(parameter.shape)
                    shape[cut] //= self.count
                    setattr(module, key, nn.Parameter(parameter.new_empty(shape), parameter.requires_grad))
            if style == "colwise":
                entrance = entrances.setdefault(name.rpartition(".")[0], _Entrance(self.group))
                module.register_forward_pre_hook(entrance)
            elif style == "rowwise":
                module.forward = partial(_added_up, module, self.group)
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
        embeddings.register_forward_hook(lambda _module, _given, out: scale_gradient(out, 1 / self.count))
        base.norm.register_forward_pre_hook(_Entrance(self.group))
        return found

    def gradient(self, name: str, gradient: Tensor) -> Tensor:
        """That of parameter `name`, of which each rank of the group may have its own heads' alone."""
        if name not in self._summed:
            return gradient
        whole = gradient.clone()
        dist.all_reduce(whole, group=self.group)
        return whole

    def logprobs(
        self, head: Head, hidden: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As `token_logprobs`, each rank of the group computing some tokens; only those have gradient on it."""
        ends = [len(targets) * i // self.count for i in range(self.count + 1)]
        own = slice(ends[self.rank], ends[self.rank + 1])
        logprobs, entropies = token_logprobs(head, hidden[own], targets[own], temperature, chunk, entropy)
        whole = partial(whole_of, ends=ends, rank=self.rank, group=self.group)
        return whole(logprobs), None if entropies is None else whole(entropies)


def plan_of(model: nn.Module, count: int, context: int) -> dict[str, Style]:
    """How `count` ranks cut the layers of `model` for micro-batches in `context` parts: a style for each module that is
    not simply the same on all, by its name in the base model.

    Raises:
        UserError: they cannot.
    """
    kind, base = type(model).__name__, base_model(model)
    _check_heads(model, count, context)
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    modules, styles = dict(base.named_modules()), {}
    for name in (*modules, *(n for n, _ in base.named_parameters())):
        style: Any = next((s for p, s in patterns.items() if p.fullmatch(name)), None)
        if style is None or not name.startswith("layers."):
            continue
        module, size = modules.get(name), _SIZES.get(style)
        if module is None or style not in Style.__args__ or (size and not isinstance(module, nn.Linear)):  # type: ignore[attr-defined]
            raise _refused(count, f"{kind} has {name} split as {style}, which this trainer cannot do")
        if size and getattr(module, size) % count:
            raise _refused(count, f"{name} has {size} = {getattr(module, size)}, which that does not divide")
        styles[name] = style
    if not styles:
        raise _refused(count, f"transformers has no plan by which to split {kind}; leave it out")
    norm, head = getattr(base, "norm", None), model.get_output_embeddings()  # type: ignore[operator]
    around = (model.get_input_embeddings(), norm, head, base.layers)  # type: ignore[operator]
    known = {id(p) for module in around if module is not None for p in module.parameters()}
    strange = [name for name, p in model.named_parameters() if id(p) not in known]
    if norm is None or strange:
        what = strange[0] if strange else "no final norm"
        raise _refused(count, f"{kind} has {what} beside embeddings, layers, final norm and output head")
    return styles


def _check_heads(model: nn.Module, count: int, context: int) -> None:
    config: Any = model.config
    heads = int(config.num_attention_heads)
    for number, what in ((heads, "attention"), (int(getattr(config, "num_key_value_heads", heads)), "key-value")):
        if number % count:
            raise _refused(count, f"the model has {number} {what} heads, which that does not divide")
    if heads % (count * context):
        raise _refused(
            count,
            f"with trainer.context_parallel = {context} it takes a multiple of {count * context} attention heads, and "
            f"the model has {heads}",
        )


def _refused(count: int, why: str) -> UserError:
    return UserError(f"trainer.tensor_parallel = {count}: {why}")


class _Entrance:
    """A hook where what all ranks have goes into what each has a part of, once for all modules that it goes into."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def __call__(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, made = given[0], None
        if self._last is not None and self._last[0]() is x:
            made = self._last[1]()
        if made is None:
            made = _Parted.apply(x, self._group)
            self._last = weakref.ref(x), weakref.ref(made)
        return (made, *given[1:])


def _added_up(module: nn.Linear, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """The forward pass of a matrix of which each rank has some columns, and of `x` what they are for."""
    out: Tensor = _Sum.apply(linear(x, module.weight), group)
    return out if module.bias is None else out + module.bias


class _Parted(torch.autograd.Function):
    """The same forth; back, the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _Sum(torch.autograd.Function):
    """Forth, the sum over all ranks, in place; the same back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
