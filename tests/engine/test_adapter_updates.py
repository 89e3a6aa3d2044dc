"""Weight updates by adapters: each version is the first weights and its own adapters, whatever came between."""

from __future__ import annotations

import pytest
import torch
from test_updates import REQUESTS, assert_true_logprobs, run_with_updates
from tiny_engine import ask, engine_of, prompt_of, run_all, score, tiny_model
from torch import Tensor

from fleuve.engine.engine import Update
from fleuve.engine.parameters import Parameters, WeightsMismatchError
from fleuve.weights.adapters import Adapter, adapters_of, merged, named

LAYERS = ("self_attn.q_proj", "mlp.down_proj")


def adapters(version: int, layers: tuple[str, ...] = LAYERS) -> dict[str, Tensor]:
    """Of each version others, in every layer, as a trainer would publish them."""
    made, noise = {}, torch.Generator().manual_seed(version)
    for name, matrix in tiny_model().named_parameters():
        if name.removesuffix(".weight").endswith(layers):
            rows, columns = matrix.shape
            a, b = torch.randn(3, columns, generator=noise), torch.randn(rows, 3, generator=noise)
            made[name] = Adapter(a, 0.1 * b)
    return named(made)


def model_of(version: int) -> torch.nn.Module:
    model = tiny_model()
    if version:
        parameters = dict(model.named_parameters())
        for name, adapter in adapters_of(adapters(version)).items():
            parameters[name].data = merged(parameters[name].data, adapter)
    return model


def test_every_token_has_the_log_probability_of_its_version() -> None:
    engine = engine_of(model_of(0))
    answers = run_with_updates(engine, REQUESTS, {7: 1, 19: 2, 20: 3, 45: 5}, "recompute", adapters)
    assert {0, 1, 3, 5} <= assert_true_logprobs(answers, REQUESTS, model_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_versions_before_leave_no_trace_in_the_next(dtype: torch.dtype) -> None:
    """Bit for bit what an engine has that only ever saw the last; and the first weights again where B is zero."""
    model, fresh = tiny_model().to(dtype), tiny_model().to(dtype)
    parameters = Parameters(model)
    for version in range(1, 20):
        parameters.load(adapters(version))
    parameters.load(adapters(20))
    Parameters(fresh).load(adapters(20))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    parameters.load({n: torch.zeros_like(t) if n.endswith("_B") else t for n, t in adapters(1).items()})
    first = tiny_model().to(dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True))


def test_a_matrix_that_has_no_adapter_any_more_is_the_first_again() -> None:
    model = tiny_model()
    parameters = Parameters(model)
    parameters.load(adapters(1))
    parameters.load(adapters(2, LAYERS[:1]))
    first, now = dict(tiny_model().named_parameters()), dict(model.named_parameters())
    assert torch.equal(now["model.layers.1.mlp.down_proj.weight"], first["model.layers.1.mlp.down_proj.weight"])
    assert not torch.equal(
        now["model.layers.1.self_attn.q_proj.weight"], first["model.layers.1.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.lora_A"), "layers.0.self_attn.q_proj.lora_A is missing"),
        (
            lambda t: t.update({"stray.lora_A": torch.ones(2, 3), "stray.lora_B": torch.ones(3, 2)}),
            "unknown: stray.wei",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_B": torch.ones(5, 3)}),
            r"wrong shape: model.layers.0.self_attn.q_proj.weight \(5, 64\) instead of \(64, 64\)",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_anything_is_touched(change, words: str) -> None:
    tensors = adapters(1)
    change(tensors)
    with pytest.raises(WeightsMismatchError, match=words):
        Parameters(tiny_model()).check(tensors)


def test_after_whole_weights_adapters_are_refused() -> None:
    engine = engine_of(model_of(0))
    engine.request_update(Update(1, dict(tiny_model(5).named_parameters()), "recompute"))
    answer = run_all(engine, [ask("a", prompt_of(0, 9))])["a"]
    assert answer.logprobs == pytest.approx(score(tiny_model(5), prompt_of(0, 9), answer.output_ids), abs=1e-4)
    with pytest.raises(WeightsMismatchError, match="it has had others since"):
        engine.parameters.check(adapters(2))
