"""New values for a model's parameters: checked whole before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fleuve.engine.linear import PackedLinear
from fleuve.weights.adapters import Adapter, adapters_of, merged


class WeightsMismatchError(ValueError):
    """A weight file does not fit the model that this engine serves."""


class Parameters:
    """The tensors of a model by their state-dict names. Tied ones have several names and appear once in a file.

    A file holds all of them, or adapters (`weights.adapters`). Those change the matrices that the model was opened
    with, of which a copy is kept once there are some; so no adapters come after a file with all weights.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {name: tensor.data for name, tensor in model.state_dict(keep_vars=True).items()}
        self._first: dict[str, Tensor] = {}
        """Of the matrices that have been changed by adapters: what they were."""
        self._replaced = False
        self._packed = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raises:
        WeightsMismatchError: names are missing or unknown, or a shape differs. Says which.
        """
        try:
            adapters = adapters_of(tensors)
        except ValueError as error:
            raise WeightsMismatchError(f"adapters do not fit together: {error}") from error
        if adapters and self._replaced:
            raise WeightsMismatchError(
                "adapters change the weights that the engine was started with, and it has had others since"
            )
        shapes = {name: tuple(t.shape) for name, t in (adapters or tensors).items()}
        faults = self._faults(shapes, whole=not adapters)
        if faults:
            what = "adapters" if adapters else "weights"
            raise WeightsMismatchError(f"{what} do not fit the model: {'; '.join(faults)}")

    def _faults(self, shapes: Mapping[str, tuple[int, ...]], whole: bool) -> list[str]:
        """What is wrong with these shapes by name, each kind in some words. If `whole`, none may be missing."""
        unknown = sorted(shapes.keys() - self._tensors.keys())
        given = {self._tensors[name].data_ptr() for name in shapes.keys() & self._tensors.keys()}
        missing = sorted(name for name, t in self._tensors.items() if t.data_ptr() not in given) if whole else []
        wrong = sorted(
            f"{name} {shape} instead of {tuple(self._tensors[name].shape)}"
            for name, shape in shapes.items()
            if name in self._tensors and shape != tuple(self._tensors[name].shape)
        )
        return [
            f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for what, names in (("missing", missing), ("unknown", unknown), ("wrong shape", wrong))
            if names
        ]

    @torch.inference_mode()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy checked tensors into the model, casting to its dtype and device; or change its matrices by adapters."""
        if adapters := adapters_of(tensors):
            self._change(adapters)
        else:
            self._first, self._replaced = {}, True
            for name, tensor in tensors.items():
                self._tensors[name].copy_(tensor)
        for layer in self._packed:
            layer.pack()

    def _change(self, adapters: Mapping[str, Adapter]) -> None:
        for name in self._first.keys() - adapters.keys():
            self._tensors[name].copy_(self._first[name])
        for name, adapter in adapters.items():
            tensor = self._tensors[name]
            if name not in self._first:
                self._first[name] = tensor.clone()
            tensor.copy_(merged(self._first[name], adapter))
