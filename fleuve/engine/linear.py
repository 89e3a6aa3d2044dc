"""Linear layers on a CPU that multiply with a copy of their weights laid out for oneDNN.

A weight as it lies in the model is brought into the order of the processor's vectors by every product anew. Laid out
once a version, products of 8 to 64 rows take 0.74 to 0.87 of the time (`benchmarks/products.py`). The price is the
memory of these weights once more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMALLEST = 2**18  # weights of a layer: the products of smaller ones gain nothing
ROWS = 32  # for which oneDNN chooses the layout; it hardly matters to other numbers of rows


class PackedLinear(nn.Linear):
    """`plain` with its own parameters, and the copy, which `pack` renews after they have changed."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.pack()

    def pack(self) -> None:
        """Lay out the weights as they are now."""
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def forward(self, input: Tensor) -> Tensor:
        """Inference only. A single row is faster with the weights as they lie."""
        if input.numel() == self.in_features:
            return super().forward(input)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return out


def pack_linears(model: nn.Module) -> None:
    """Put a `PackedLinear` in the place of every large linear layer on a CPU whose dtype oneDNN multiplies there."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer.weight.numel() >= SMALLEST and _packable(layer.weight):
            model.set_submodule(name, PackedLinear(layer))


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and supported)
