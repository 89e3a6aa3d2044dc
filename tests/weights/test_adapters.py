"""Adapters: what they are in a file, and what a matrix becomes by them."""

from __future__ import annotations

import pytest
import torch

from fleuve.weights.adapters import Adapter, adapters_of, merged, named

ADAPTER = Adapter(torch.randn(2, 5), torch.randn(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_changes_by_the_product_and_is_rounded_once(dtype: torch.dtype) -> None:
    base = torch.randn(3, 5).to(dtype)
    want = (base.double() + ADAPTER.b.double() @ ADAPTER.a.double()).to(dtype)
    got = merged(base, ADAPTER)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), want.double(), rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-6)
    assert torch.equal(merged(base, ADAPTER._replace(b=torch.zeros(3, 2))), base)


def test_names_go_there_and_back() -> None:
    tensors = named({"model.q.weight": ADAPTER, "model.k.weight": ADAPTER})
    assert sorted(tensors) == ["model.k.lora_A", "model.k.lora_B", "model.q.lora_A", "model.q.lora_B"]
    assert adapters_of(tensors) == {"model.k.weight": ADAPTER, "model.q.weight": ADAPTER}
    assert ADAPTER.shape == (3, 5)


def test_whole_weights_are_no_adapters() -> None:
    assert adapters_of({"model.q.weight": torch.zeros(3, 5)}) == {}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"q.lora_A": ADAPTER.a}, "q.lora_B is missing"),
        ({"q.lora_B": ADAPTER.b}, "q.lora_A is missing"),
        ({"q.lora_A": ADAPTER.a, "q.lora_B": ADAPTER.b, "k.weight": ADAPTER.b}, "k.weight is among adapters"),
        ({"q.lora_A": ADAPTER.b, "q.lora_B": ADAPTER.a}, r"q\.weight: \(2, 5\) and \(3, 2\) have no product"),
        ({"q.lora_A": torch.zeros(2), "q.lora_B": ADAPTER.b}, "have no product"),
    ],
)
def test_what_is_no_set_of_adapters_is_refused_by_name(tensors: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        adapters_of(tensors)
