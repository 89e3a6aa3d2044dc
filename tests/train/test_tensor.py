"""Ranks that compute layers together come to what one alone comes to, on any mesh, and go on from each other's
checkpoints. Five steps of two such ranks are in `test_rank_meshes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_results import Found, assert_same
from rank_scenarios import SETS
from safetensors.torch import load_file
from tiny import FAMILIES, SMALL

from fleuve.errors import UserError
from fleuve.modeling.loading import build_model
from fleuve.train.layout import Layout, overlap, within
from fleuve.train.state_files import StateFiles
from fleuve.train.tensor import plan_of
from fleuve.weights.store import read_weights


def _as_steps(result: Any) -> Any:
    """A single step's metrics, without times, as a list of them."""
    metrics = result["metrics"] if isinstance(result["metrics"], list) else [result["metrics"]]
    timeless = [{name: value for name, value in m.items() if not name.startswith("time/")} for m in metrics]
    return {"metrics": timeless, "weights": result["weights"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("everything", "4x1x2"),
        ("kl_in_reward", "2x1x2"),
        ("long_sequences", "4x2x2"),
        ("long_untied", "2x1x2"),
        ("biased", "2x1x2"),
        ("few_sequences", "2x1x2"),
    ],
)
def test_ranks_that_compute_layers_together_come_to_what_one_comes_to(found: Found, name: str, mesh: str) -> None:
    """Metrics and with them losses and gradient norms, and weights; and all ranks to the same bits."""
    (alone,), (first, *others) = found(name, 0), found(name, mesh)
    assert_same(_as_steps(first), _as_steps(alone), metrics=2e-5, weights=1e-5)
    for other in others:
        assert _as_steps(other)["metrics"] == _as_steps(first)["metrics"]
        assert all(torch.equal(other["weights"][n], w) for n, w in first["weights"].items())


@pytest.mark.slow
def test_half_precision_is_as_close_as_it_is_precise(found: Found) -> None:
    (alone,), (ours, _) = found("half_precision", 0), found("half_precision", "2x1x2")
    for a, b in zip(ours["metrics"], alone["metrics"], strict=True):
        assert a["loss/policy"] == pytest.approx(b["loss/policy"], abs=2e-3)
        assert a["loss/grad_norm"] == pytest.approx(b["loss/grad_norm"], rel=2e-2)
    for name, weight in alone["weights"].items():
        assert (ours["weights"][name] - weight).abs().mean() < 1e-3


@pytest.mark.slow
def test_all_ranks_end_an_interrupted_step_at_the_same_micro_batch(found: Found) -> None:
    first, second = found("interrupted", "2x1x2")
    assert first["passes"] == second["passes"] == first["sizes"][0] + 1
    assert first["after"] == second["after"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x1x2", "4x1x2"])
def test_what_is_published_and_saved_as_a_model_is_whole(directory: Path, found: Found, mesh: str) -> None:
    (alone,), first = found("saved", 0), found("saved", mesh)[0]
    model = load_file(directory / "saved" / mesh / "model" / "model.safetensors")
    published = read_weights(first["published"])
    assert published.keys() == alone["saved"].keys()
    for name, weight in published.items():
        assert torch.equal(weight, first["saved"][name])
        assert torch.equal(model[name], weight)
        assert torch.allclose(weight, alone["saved"][name], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SETS["tensor"]["resumed"])
@pytest.mark.parametrize("origin", SETS["tensor"]["saved"])
def test_a_checkpoint_of_any_mesh_goes_on_on_any_other(found: Found, origin: str, mesh: str) -> None:
    after = found("saved", origin)[0]
    ours = found("resumed", mesh)[0][_whole_name(origin)]
    assert ours["version"] == 2
    if mesh == origin:
        assert ours["metrics"] == after["metrics"]
        assert all(torch.equal(ours["weights"][name], w) for name, w in after["weights"].items())
    assert_same(ours, after, metrics=1e-5, weights=1e-6)


@pytest.mark.slow
def test_each_rank_writes_its_own_part_and_no_more(directory: Path, found: Found) -> None:
    path, (first, *_) = directory / "saved" / "4x1x2", found("saved", "4x1x2")
    files = [load_file(path / f"trainer-0000{rank}-of-00004.safetensors") for rank in (1, 2, 3, 4)]
    name = "model.layers.0.mlp.down_proj.weight"  # 32 × 48: cut along columns, then rows
    assert [tuple(file[f"master/{name}"].shape) for file in files] == [(16, 24)] * 4
    halves = [torch.cat([files[rank][f"master/{name}"] for rank in (column, column + 2)]) for column in (0, 1)]
    assert torch.equal(torch.cat(halves, dim=1), first["saved"][name])
    assert sum(len(file["master/model.embed_tokens.weight"]) for file in files) == SMALL["vocab_size"]
    with StateFiles(path) as whole:
        assert all(torch.equal(whole[f"master/{name}"], w) for name, w in first["saved"].items())


def _whole_name(mesh: str) -> str:
    return mesh if "x" in mesh else f"{max(int(mesh), 1)}x1x1"


@pytest.mark.parametrize("layout", [Layout(6, 2, {"a": 0, "b": 1, "c": None}), Layout(5), Layout()])
@pytest.mark.parametrize(("name", "shape"), [("a", (14, 3)), ("b", (7, 10)), ("c", (9,)), ("d", (4, 2, 3))])
def test_parts_make_up_the_whole_and_overlap_nowhere(layout: Layout, name: str, shape: tuple[int, ...]) -> None:
    boxes = [layout.box(name, shape, rank) for rank in range(layout.count)]
    assert layout.whole(name, [[s.stop - s.start for s in box] for box in boxes]) == list(shape)
    times = torch.zeros(shape, dtype=torch.int64)
    for rank, box in enumerate(boxes):
        if layout.counts(name, rank):
            times[box] += 1
    assert torch.equal(times, torch.ones_like(times))


def test_what_two_parts_have_in_common_is_found_in_each() -> None:
    whole = torch.arange(60).view(6, 10)
    ours, theirs = (slice(1, 5), slice(0, 7)), (slice(3, 6), slice(5, 10))
    common = overlap(ours, theirs)
    assert common is not None
    assert torch.equal(whole[ours][within(common, ours)], whole[theirs][within(common, theirs)])
    assert overlap(ours, (slice(5, 6), slice(0, 10))) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_split_as_transformers_plans(family: str) -> None:
    plan = plan_of(build_model({**SMALL, **FAMILIES[family]}), 2, 1)
    into, out = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"), ("self_attn.o", "mlp.down")
    of_a_layer = {n.removeprefix("layers.1."): style for n, style in plan.items() if n.startswith("layers.1.")}
    norms = {n: style for n, style in of_a_layer.items() if "norm" in n}
    assert {n: s for n, s in of_a_layer.items() if n not in norms} == {
        **{f"{n}_proj": "colwise" for n in into},
        **{f"{n}_proj": "rowwise" for n in out},
    }
    assert len(norms) == (2 if family in ("qwen3-tied", "gemma3") else 0)


@pytest.mark.parametrize(
    ("config", "count", "context", "why"),
    [
        ({"model_type": "qwen3"}, 3, 1, "the model has 4 attention heads, which that does not divide"),
        ({"model_type": "qwen3"}, 4, 1, "the model has 2 key-value heads, which that does not divide"),
        ({"model_type": "qwen3"}, 2, 4, "it takes a multiple of 8 attention heads, and the model has 4"),
        ({"model_type": "llama", "intermediate_size": 49}, 2, 1, r"layers\.0\.mlp\.gate_proj has out_features = 49"),
        ({"model_type": "gpt2"}, 2, 1, "transformers has no plan by which to split GPT2LMHeadModel"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16},
            2,
            1,
            r"Qwen3MoeForCausalLM has layers\.0\.mlp\.experts split as moe_tp_experts, which this trainer cannot do",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(
    config: dict[str, object], count: int, context: int, why: str
) -> None:
    with pytest.raises(UserError, match=f"^trainer\\.tensor_parallel = {count}: .*{why}"):
        plan_of(build_model({**SMALL, **config}), count, context)
