"""A trainer of several ranks does what one alone does: same losses, same gradients, same weights, same decisions.
More ranks, and more of what they compute, are in `test_rank_meshes`."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_results import Found, assert_come_to, assert_one, assert_same
from rank_scenarios import SCENARIOS, SETS
from safetensors.torch import load_file
from tiny import make_trainer
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM

from fleuve.errors import UserError
from fleuve.train.layout import rows_of
from fleuve.train.leader import Command, _next_command, _signature, _text
from fleuve.train.state_files import StateFiles
from fleuve.weights.store import read_weights


def test_five_steps_are_the_same_in_two_ranks(found: Found) -> None:
    """Loss and gradient norm to 1e-5, weights too, and every metric that a step has."""
    (alone,) = found("everything", 0)
    ours = found("everything", 2)[0]
    assert ours["advantages"] == alone["advantages"]
    assert {"loss/policy", "loss/grad_norm", "loss/entropy", "loss/kl_reference"} <= ours["metrics"][0].keys()
    assert_same(ours, alone, metrics=1e-5, weights=1e-5)


def test_all_ranks_hold_the_same_weights_and_say_the_same_to_the_last_bit(found: Found) -> None:
    assert_one(found("everything", 2))


def test_two_ranks_to_a_micro_batch_come_to_what_one_comes_to(found: Found) -> None:
    """Log-probabilities, and with them losses, gradients and weights, whichever way sequences lie across parts."""
    (alone,) = found("long_sequences", 0)
    assert_come_to(found("long_sequences", "2x2"), alone)


def test_a_rank_without_anything_to_learn_neither_hangs_nor_counts(found: Found) -> None:
    (alone,), ours = found("few_sequences", 0), found("few_sequences", 2)
    assert all(one["sizes"] == alone["sizes"] == [1, 1] for one in ours)
    assert_same(
        {"metrics": [_timeless(ours[0]["metrics"])], "weights": ours[0]["weights"]},
        {"metrics": [_timeless(alone["metrics"])], "weights": alone["weights"]},
        metrics=1e-5,
        weights=1e-5,
    )


def test_a_nan_on_one_rank_is_a_nan_for_all(found: Found) -> None:
    for ours in [*found("not_a_number", 0), *found("not_a_number", 2)]:
        assert ours["metrics"]["loss/skipped_nonfinite"] == 1.0
        assert ours["version"] == 1
        assert all(bool(torch.isfinite(w).all()) for w in ours["weights"].values())
        assert any(not torch.equal(w, ours["before"][n]) for n, w in ours["weights"].items())  # the other minibatch's


def test_all_ranks_end_an_interrupted_step_at_the_same_micro_batch(found: Found) -> None:
    first, second = found("interrupted", 2)
    assert first["sizes"] == second["sizes"]
    assert first["sizes"][1] > 1
    assert first["passes"] == second["passes"] == first["sizes"][0] + 1
    assert first["trained"] == second["trained"] == [100, 101, 102]
    assert first["after"] == second["after"] > 0


def test_what_is_published_is_whole(found: Found) -> None:
    (alone,), (first, other) = found("saved", 0), found("saved", 2)
    assert other["published"] is None
    published = read_weights(first["published"])
    assert published.keys() == alone["saved"].keys()
    for name, weight in published.items():
        assert torch.equal(weight, first["saved"][name])
        assert torch.allclose(weight, alone["saved"][name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("origin", [0, 2])
def test_a_checkpoint_of_any_number_of_ranks_goes_on_on_any_other(found: Found, origin: int, count: int) -> None:
    after = found("saved", origin)[0]
    ours = found("resumed", count)[0][f"{max(origin, 1)}x1x1"]
    assert ours["version"] == 2
    if count == origin:
        assert ours["metrics"] == after["metrics"]
        assert all(torch.equal(ours["weights"][name], w) for name, w in after["weights"].items())
    assert_same(ours, after, metrics=1e-5, weights=1e-6)


def test_the_model_in_a_checkpoint_is_a_plain_one(directory: Path, found: Found) -> None:
    (first, _) = found("saved", 2)
    path = directory / "saved" / "2x1x1"
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    for name, weight in model.named_parameters():
        assert torch.equal(weight, first["saved"][name])
    assert _names(path / "model") == _names(directory / "saved" / "1x1x1" / "model")
    assert _names(path) == ["model", "trainer-00001-of-00002.safetensors", "trainer-00002-of-00002.safetensors"]


def test_each_rank_writes_its_own_rows_and_no_more(directory: Path) -> None:
    path = directory / "saved" / "2x1x1"
    files = [load_file(path / f"trainer-0000{rank}-of-00002.safetensors") for rank in (1, 2)]
    whole = load_file(directory / "saved" / "1x1x1" / "trainer.safetensors")
    assert all(file.keys() == whole.keys() for file in files)
    for name, tensor in whole.items():
        if tensor.ndim:
            assert [len(file[name]) for file in files] == [len(tensor[rows_of(len(tensor), r, 2)]) for r in (0, 1)]


def test_a_checkpoint_with_a_missing_share_is_refused(directory: Path, tmp_path: Path) -> None:
    path = directory / "saved" / "2x1x1"
    (tmp_path / "trainer-00001-of-00002.safetensors").write_bytes(
        (path / "trainer-00001-of-00002.safetensors").read_bytes()
    )
    trainer = make_trainer(directory / "saved" / "model", tmp_path / "weights")
    with pytest.raises(UserError, match=r"no whole checkpoint: trainer-00002-of-00002\.safetensors is missing"):
        trainer.load(tmp_path)


def test_shares_of_two_different_checkpoints_are_no_checkpoint(directory: Path, tmp_path: Path) -> None:
    path = directory / "saved" / "2x1x1"
    for rank in (1, 2):
        name = f"trainer-0000{rank}-of-00002.safetensors"
        content = (path / name).read_bytes()
        (tmp_path / name).write_bytes(content if rank == 1 else content.replace(b'"version":"2"', b'"version":"3"'))
    with pytest.raises(UserError, match="of different versions: 2, 3"):
        StateFiles(tmp_path)


def test_what_one_rank_cannot_write_all_say_and_go_on(found: Found) -> None:
    first, other = found("not_writable", 2)
    assert "cannot write the checkpoint" in first["said"] == other["said"]
    assert first["left"] == []
    assert "weights-00000000" in first["unpublished"]
    assert first["metrics"] == other["metrics"]
    assert math.isfinite(first["metrics"][0]["loss/grad_norm"])


def test_every_scenario_is_looked_at() -> None:
    assert SCENARIOS.keys() == set().union(*SETS.values())


def _timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def _names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_a_command_that_rank_0_did_not_sign_is_not_obeyed() -> None:
    store = HashStore()
    group = SimpleNamespace(store=store, secret="known to the ranks")
    command = _text(Command("save", "/somewhere"))
    store.set("command/1", f"{_signature(group, 1, command)} {command}")
    assert _next_command(group, 1).path == "/somewhere"
    for forged in (command, f" {command}", f"{_signature(group, 1, command)} {command}"):
        store.set("command/2", forged)  # unsigned, unsigned, or an earlier one once more
        with pytest.raises(RuntimeError, match="command 2 is not rank 0's"):
            _next_command(group, 2)
