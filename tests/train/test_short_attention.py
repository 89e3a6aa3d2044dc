"""Attention by plain products is attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fleuve.train.attention import SHORT, PackedAttention
from fleuve.train.short_attention import short_attention


def _inputs(lengths: list[int], heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(lengths)
    return [torch.randn(tokens, n, 8, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    pieces = []
    for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
        out = scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 12, 5]])
def test_values_and_gradients_are_the_fused_kernel_s(lengths: list[int], heads: int, kv_heads: int) -> None:
    inputs = _inputs(lengths, heads, kv_heads, torch.float64)
    ours, fused = short_attention(*inputs, lengths, 0.3), _fused(*inputs, lengths, 0.3)
    assert torch.allclose(ours, fused, atol=1e-12)
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((fused * weight).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_it_takes_what_a_transpose_leaves() -> None:
    """Queries and keys come as views whose heads lie outside the tokens."""
    lengths = [5, 9]
    q, k, v = (x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in _inputs(lengths, 4, 2, torch.float64))
    assert not q.is_contiguous()
    assert torch.allclose(short_attention(q, k, v, lengths, 0.5), _fused(q, k, v, lengths, 0.5), atol=1e-12)


@pytest.mark.parametrize("lengths", [[40, 90, 17], [SHORT + 1, 20]])
def test_bf16_is_near_fp32_whichever_way_it_takes(lengths: list[int]) -> None:
    inputs = _inputs(lengths, 4, 2, torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    ours = PackedAttention(lengths)(0, *inputs, scale=0.35, window=None, softcap=None)
    fused = _fused(*exact, lengths, 0.35)
    assert ours.dtype == torch.bfloat16
    assert torch.allclose(ours.float(), fused, atol=0.03)
    weight = torch.randn_like(fused)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((fused * weight).sum(), exact),
        strict=True,
    ):
        assert torch.allclose(a.float(), b, atol=0.15)
        assert torch.cosine_similarity(a.float().flatten(), b.flatten(), dim=0) > 0.999
