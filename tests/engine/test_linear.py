"""Linear layers with packed weights: the products and the parameters of the plain ones, under every version."""

from __future__ import annotations

import pytest
import torch
from test_adapter_updates import adapters
from test_adapter_updates import model_of as adapted
from test_updates import REQUESTS, assert_true_logprobs, model_of, run_with_updates, weights_of
from tiny_engine import engine_of, tiny_model

from fleuve.engine import linear
from fleuve.engine.linear import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN in this torch")
BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this processor"
    ),
)


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the tiny model are packed too."""
    monkeypatch.setattr(linear, "SMALLEST", 1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 200])
@torch.inference_mode()
def test_products_are_those_of_the_plain_layer(rows: int, bias: bool, dtype: torch.dtype) -> None:
    plain = torch.nn.Linear(96, 50, bias, dtype=dtype)
    packed, x = PackedLinear(plain), torch.randn(1, rows, 96, dtype=dtype)
    torch.testing.assert_close(packed(x), plain(x), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    assert packed(x).shape == (1, rows, 50)
    with torch.no_grad():
        plain.weight.mul_(2)
    packed.pack()
    torch.testing.assert_close(packed(x), plain(x), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


def test_layers_that_gain_by_it_are_packed_and_parameters_stay_what_they_were() -> None:
    model = tiny_model(hidden_size=256, intermediate_size=1024, tie_word_embeddings=True)
    before = {name: (p, p.data_ptr()) for name, p in model.state_dict(keep_vars=True).items()}
    pack_linears(model)
    layer = model.model.layers[1]
    assert isinstance(layer.mlp.up_proj, PackedLinear)
    assert isinstance(layer.mlp.down_proj, PackedLinear)
    assert type(layer.self_attn.q_proj) is torch.nn.Linear  # 256 × 64 weights
    after = model.state_dict(keep_vars=True)
    assert {name: (p, p.data_ptr()) for name, p in after.items()} == before
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_is_not_packed_stays_plain(dtype: torch.dtype, every_size: None) -> None:
    model = tiny_model().to(dtype)
    pack_linears(model)
    assert not any(isinstance(layer, PackedLinear) for layer in model.modules())


@pytest.mark.parametrize("kind", ["weights", "adapters"])
def test_every_token_has_the_log_probability_of_its_version(kind: str, every_size: None) -> None:
    tensors_of, reference = (weights_of, model_of) if kind == "weights" else (adapters, adapted)
    model = reference(0)
    pack_linears(model)
    assert sum(isinstance(layer, PackedLinear) for layer in model.modules()) == 3 * 7 + 1
    engine = engine_of(model)
    answers = run_with_updates(engine, REQUESTS, {7: 1, 19: 2, 45: 5}, "recompute", tensors_of)
    assert {0, 1, 2, 5} <= assert_true_logprobs(answers, REQUESTS, reference)
