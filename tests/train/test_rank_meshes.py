"""As `test_ranks`, for more ranks and more of what they compute."""

from __future__ import annotations

import pytest
import torch
from rank_results import Found, assert_come_to, assert_one, assert_same

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mesh", [4, "2x1x2"])
def test_five_steps_are_the_same_on_any_mesh(found: Found, mesh: int | str) -> None:
    """Loss, gradient norm, weights and metrics; of each rank to the last bit."""
    (alone,) = found("everything", 0)
    ours = found("everything", mesh)
    assert ours[0]["advantages"] == alone["advantages"]
    assert_same(ours[0], alone, metrics=1e-5, weights=1e-5)
    assert_one(ours)


def test_what_only_some_ranks_compute_reaches_all(found: Found) -> None:
    (alone,) = found("kl_in_reward", 0)
    for ours in found("kl_in_reward", 2):
        for a, b in zip(ours["advantages"], alone["advantages"], strict=True):
            assert [x for row in a for x in row] == pytest.approx([x for row in b for x in row], abs=1e-5)
        assert_same(ours, alone, metrics=2e-5, weights=1e-5)


def test_four_ranks_that_share_micro_batches_in_twos_come_to_what_one_comes_to(found: Found) -> None:
    (alone,) = found("long_untied", 0)
    assert_come_to(found("long_untied", "4x2"), alone)


def test_half_precision_is_as_close_as_it_is_precise(found: Found) -> None:
    (alone,), (ours, _) = found("half_precision", 0), found("half_precision", 2)
    for a, b in zip(ours["metrics"], alone["metrics"], strict=True):
        assert a["loss/policy"] == pytest.approx(b["loss/policy"], abs=2e-3)
        assert a["loss/grad_norm"] == pytest.approx(b["loss/grad_norm"], rel=2e-2)
    for name, weight in alone["weights"].items():
        assert (ours["weights"][name] - weight).abs().mean() < 1e-3
        assert ours["weights"][name].dtype == torch.float32


def test_chunks_of_the_output_head_add_up_without_rounding(found: Found) -> None:
    """Added up in half precision, they are 0.6 % apart."""
    (alone,), (ours,) = found("one_token_chunks", 0), found("one_token_chunks", 1)
    assert (ours - alone).norm() < 1e-6 * alone.norm()


@pytest.mark.parametrize("origin", [0, 2])
def test_a_checkpoint_goes_on_in_four_ranks(found: Found, origin: int) -> None:
    after = found("saved", origin)[0]
    ours = found("resumed", 4)[0][f"{max(origin, 1)}x1x1"]
    assert ours["version"] == 2
    assert_same(ours, after, metrics=1e-5, weights=1e-6)
