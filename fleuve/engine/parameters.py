"""New values for a model's parameters: checked whole before anything is touched."""

from __future__ import annotations

import torch
from torch import Tensor


class WeightsMismatchError(ValueError):
    """A weight file does not fit the model that this engine serves."""


class Parameters:
    """The tensors of a model by their state-dict names. Tied ones have several names and appear once in a file."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {name: tensor.data for name, tensor in model.state_dict(keep_vars=True).items()}

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raises:
        WeightsMismatchError: names are missing or unknown, or a shape differs. Says which.
        """
        unknown = sorted(tensors.keys() - self._tensors.keys())
        given = {self._tensors[name].data_ptr() for name in tensors.keys() & self._tensors.keys()}
        missing = sorted(name for name, t in self._tensors.items() if t.data_ptr() not in given)
        shapes = sorted(
            f"{name} {tuple(t.shape)} instead of {tuple(self._tensors[name].shape)}"
            for name, t in tensors.items()
            if name in self._tensors and t.shape != self._tensors[name].shape
        )
        faults = [
            f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for what, names in (("missing", missing), ("unknown", unknown), ("wrong shape", shapes))
            if names
        ]
        if faults:
            raise WeightsMismatchError(f"weights do not fit the model: {'; '.join(faults)}")

    @torch.inference_mode()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy checked tensors into the model, casting to its dtype and device."""
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)
