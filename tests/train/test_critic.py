"""The critic: values of packed sequences, where its gradient goes, that it learns, and that a checkpoint keeps it."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, VOCABULARY, same_weights, save_tiny_model

from fleuve.errors import UserError
from fleuve.modeling.loading import load_model
from fleuve.train import checkpoint
from fleuve.train.critic import Critic
from fleuve.train.microbatch import MicroBatch, Sample, make_micro_batches
from fleuve.train.optimizer import MasterOptimizer
from fleuve.train.policy import Policy

BACKBONES = ["own", "shared"]
DTYPES = [torch.float32, torch.bfloat16]
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _build(
    model: Path, backbone: str, dtype: torch.dtype = torch.float32, head: bool = True, **options: Any
) -> tuple[Policy, MasterOptimizer, Critic]:
    """A policy, its optimiser and its critic, whose head is random instead of zero if `head`."""
    policy = Policy(load_model(str(model), torch.float32), temperature=0.9, chunk=16)
    optimizer = MasterOptimizer(policy.model, dtype, **ADAMW)
    critic = Critic(policy, options.pop("path", str(model)), backbone=backbone, dtype=dtype, **ADAMW, **options)
    if head:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            critic.model.head.weight.normal_(std=0.2, generator=generator)
            critic.model.head.bias.fill_(0.5)
    return policy, optimizer, critic


def _samples(count: int = 7, seed: int = 0) -> list[Sample]:
    """`behaviour` numbers the learnt tokens, so that they can be found again in a pack."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        tokens = rng.integers(3, VOCABULARY, rng.integers(4, 20)).astype(np.int32)
        targets = np.arange(2, len(tokens), dtype=np.int32)
        names = (100 * i + targets).astype(np.float32)
        samples.append(Sample(tokens, targets, behaviour=names, versions=np.zeros(len(targets), dtype=np.int32)))
    return samples


def _loss(critic: Critic, m: MicroBatch, denominator: float, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Against returns that are a function of the token to come."""
    values = critic.values(m, hidden)
    returns = (m.targets % 3).float()
    everything = torch.ones_like(m.targets, dtype=torch.bool)
    return critic.loss(values, values.detach(), returns, everything, denominator=denominator)[0]


def _gradients(optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(m) if m.grad is None else m.grad.clone() for name, m in optimizer.masters.items()}


def _weights(optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    return {name: m.detach().clone() for name, m in optimizer.masters.items()}


def _close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    """Relative to each tensor's largest entry."""
    return a.keys() == b.keys() and all(
        torch.allclose(a[k], b[k], rtol=0, atol=tolerance * float(b[k].abs().max()) + 1e-12) for k in a
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_values_of_packed_sequences_are_those_they_have_alone(tmp_path: Path, family: str, backbone: str) -> None:
    _, _, critic = _build(save_tiny_model(tmp_path, family), backbone)
    samples = _samples()
    with torch.no_grad():
        (packed,) = make_micro_batches(samples, 1000)
        together = critic.values(packed)[packed.behaviour.argsort()]
        alone = torch.cat([critic.values(make_micro_batches([s], 1000)[0]) for s in samples])
    assert together.dtype == torch.float32
    assert float(alone.std()) > 0.1
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_value_sees_nothing_of_the_token_it_comes_before_nor_of_later_ones(model: Path) -> None:
    _, _, critic = _build(model, "own")
    (sample,) = _samples(1)
    other = Sample(sample.tokens.copy(), sample.targets, sample.behaviour, sample.versions)
    other.tokens[sample.targets[1] :] = 3
    with torch.no_grad():
        a, b = (critic.values(make_micro_batches([s], 1000)[0]) for s in (sample, other))
    assert torch.equal(a[:2], b[:2])
    assert not torch.equal(a[2:], b[2:])


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_new_critic_says_zero_and_its_head_has_a_gradient(model: Path, backbone: str) -> None:
    _, _, critic = _build(model, backbone, head=False)
    (m,) = make_micro_batches(_samples(), 1000)
    values = critic.values(m)
    assert torch.equal(values, torch.zeros(len(m.targets)))
    _loss(critic, m, 1.0).backward()
    assert critic.model.head.weight.grad is not None
    assert bool((critic.model.head.weight.grad != 0).all())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_gradient_does_not_depend_on_the_packing(model: Path, backbone: str) -> None:
    gradients = []
    samples = _samples()
    tokens = float(sum(len(s.targets) for s in samples))
    for budget in (1000, 40, 20):
        _, optimizer, critic = _build(model, backbone)
        for m in make_micro_batches(samples, budget):
            _loss(critic, m, tokens).backward()
        gradients.append(_gradients(critic.optimizer) | {f"policy/{n}": g for n, g in _gradients(optimizer).items()})
    assert float(gradients[0]["head.weight"].abs().max()) > 0
    assert all(_close(g, gradients[0]) for g in gradients[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coefficient", [0.1, 1.0])
def test_a_shared_backbone_gets_the_policy_s_gradient_and_a_share_of_the_value_s_once(
    model: Path, dtype: torch.dtype, coefficient: float
) -> None:
    """In bf16 the sum of both flows through the layers rounded; only the head's own gradient is as exact as in fp32."""
    micro_batches = make_micro_batches(_samples(), 40)

    policy, optimizer, critic = _build(model, "shared", dtype, coefficient=coefficient)
    for m in micro_batches:
        output = policy.outputs(m)
        (-output.logprobs.mean() + _loss(critic, m, 10.0, output.hidden)).backward()
    ours, ours_head = _gradients(optimizer), _gradients(critic.optimizer)

    policy, optimizer, critic = _build(model, "shared", dtype)
    for m in micro_batches:
        (-policy.logprobs(m)[0].mean()).backward()
    of_policy = _gradients(optimizer)
    optimizer.zero_grad()
    critic.coefficient = 1.0
    for m in micro_batches:
        _loss(critic, m, 10.0).backward()
    of_value = _gradients(optimizer)

    expected = {name: of_policy[name] + coefficient * of_value[name] for name in of_policy}
    assert any(float(g.abs().max()) > 0.01 for g in of_value.values())
    assert _close(ours, expected, 1e-5 if dtype == torch.float32 else 0.05)
    assert ours_head.keys() == {"head.weight", "head.bias"}
    assert _close(ours_head, _gradients(critic.optimizer))


def test_hidden_states_given_or_not_make_no_difference(model: Path) -> None:
    policy, _, critic = _build(model, "shared")
    (m,) = make_micro_batches(_samples(), 1000)
    with torch.no_grad():
        assert torch.equal(critic.values(m), critic.values(m, policy.outputs(m).hidden))


def test_an_own_backbone_leaves_the_policy_untouched(model: Path) -> None:
    policy, optimizer, critic = _build(model, "own", learning_rate=1e-2)
    before, critic_before = _weights(optimizer), _weights(critic.optimizer)
    for m in make_micro_batches(_samples(), 40):
        _loss(critic, m, 10.0, policy.outputs(m).hidden).backward()
    assert all(m.grad is None for m in optimizer.masters.values())
    norm, updated = critic.step()
    assert updated
    assert norm > 0
    assert same_weights(before, _weights(optimizer))
    after = _weights(critic.optimizer)
    assert all(not torch.equal(critic_before[n], w) for n, w in after.items())
    assert not any("lm_head" in name for name in after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_head_of_a_shared_critic_moves_at_its_own_step(model: Path, dtype: torch.dtype) -> None:
    _, optimizer, critic = _build(model, "shared", dtype, learning_rate=1e-3)
    before, head = _weights(optimizer), critic.model.head.weight.detach().clone()
    (m,) = make_micro_batches(_samples(), 1000)
    _loss(critic, m, 10.0).backward()
    critic.step()
    assert same_weights(before, _weights(optimizer))
    assert not torch.equal(head, critic.model.head.weight)


def test_while_warming_up_a_shared_backbone_gets_no_gradient(model: Path) -> None:
    policy, optimizer, critic = _build(model, "shared", warmup_steps=2)
    assert [critic.warming_up(version) for version in range(4)] == [True, True, False, False]
    (m,) = make_micro_batches(_samples(), 1000)
    with torch.no_grad():
        hidden = policy.outputs(m).hidden
    _loss(critic, m, 10.0, hidden).backward()
    assert all(master.grad is None for master in optimizer.masters.values())
    assert float(_gradients(critic.optimizer)["head.weight"].abs().max()) > 0


def _error(critic: Critic, micro_batches: list[MicroBatch], returns: str) -> float:
    """The mean squared error; teaches nothing."""
    with torch.no_grad():
        errors = [(critic.values(m) - _returns(m, returns)).square() for m in micro_batches]
    return float(torch.cat(errors).mean())


LEARNT_EVERY_TIME = [("own", "constant", torch.float32)]
"""The others take minutes together."""


def _returns(m: MicroBatch, kind: str) -> torch.Tensor:
    """`constant`, or a function of the token that the value is predicted from."""
    return torch.full((len(m.rows),), 0.7) if kind == "constant" else (m.input_ids[m.rows] % 2).float()


@pytest.mark.parametrize(
    ("backbone", "returns", "dtype"),
    [
        pytest.param(*case, marks=() if case in LEARNT_EVERY_TIME else pytest.mark.slow)
        for case in product(BACKBONES, ("constant", "last token"), DTYPES)
    ],
)
def test_the_critic_learns(model: Path, backbone: str, returns: str, dtype: torch.dtype) -> None:
    """A shared backbone learns by the policy's optimiser, moved by the value loss alone here."""
    _, optimizer, critic = _build(
        model, backbone, dtype, head=False, learning_rate=1e-2, coefficient=1.0, max_grad_norm=10.0
    )
    micro_batches = make_micro_batches(_samples(12), 60)
    tokens = float(sum(len(m.targets) for m in micro_batches))
    first = _error(critic, micro_batches, returns)
    for _ in range(40):
        for m in micro_batches:
            with torch.no_grad():
                old = critic.values(m)
            mask = torch.ones_like(m.targets, dtype=torch.bool)
            critic.loss(critic.values(m), old, _returns(m, returns), mask, denominator=tokens)[0].backward()
        critic.step()
        if critic.shared:
            optimizer.step(1e-3, 1.0)
    assert first > 0.3
    assert _error(critic, micro_batches, returns) < 0.1 * first


def test_masked_tokens_that_are_nan_let_nothing_through(model: Path) -> None:
    (m,) = make_micro_batches(_samples(), 1000)
    mask = torch.arange(len(m.targets)) % 3 != 0
    returns = torch.where(mask, 1.0, torch.nan)
    gradients = []
    for broken in (returns, returns.nan_to_num(5.0)):
        _, optimizer, critic = _build(model, "shared")
        loss, sums = critic.loss(critic.values(m), broken, broken, mask, denominator=10.0)
        loss.backward()
        assert int(sums.tokens) == int(mask.sum())
        gradients.append(_gradients(optimizer) | _gradients(critic.optimizer))
    assert same_weights(*gradients)
    assert all(bool(g.isfinite().all()) for g in gradients[0].values())


def test_a_gradient_that_is_not_finite_or_not_usable_gives_no_update(model: Path) -> None:
    _, _, critic = _build(model, "own")
    before = _weights(critic.optimizer)
    (m,) = make_micro_batches(_samples(), 1000)
    (_loss(critic, m, 10.0) * torch.inf).backward()
    assert not critic.step()[1]
    _loss(critic, m, 10.0).backward()
    assert not critic.step(usable=False)[1]
    _loss(critic, m, 10.0).backward()
    critic.zero_grad()
    assert critic.step() == (0.0, False)
    assert same_weights(before, _weights(critic.optimizer))


def test_in_bf16_the_head_computes_and_learns_in_fp32(model: Path) -> None:
    """Steps of 1e-5 are lost on a bf16 weight of 0.2."""
    _, _, critic = _build(model, "own", torch.bfloat16, learning_rate=1e-5)
    assert critic.model.head.weight.dtype == torch.float32
    assert next(critic.model.backbone.parameters()).dtype == torch.bfloat16
    before = critic.model.head.weight.detach().clone()
    (m,) = make_micro_batches(_samples(), 1000)
    assert critic.values(m).dtype == torch.float32
    _loss(critic, m, 10.0).backward()
    critic.step()
    moved = (critic.model.head.weight - before).abs()
    assert torch.allclose(moved, torch.full_like(moved, 1e-5), rtol=0.05)


def test_recomputed_layers_give_the_same_gradient(model: Path) -> None:
    gradients = []
    for again in (False, True):
        _, _, critic = _build(model, "own", activation_checkpointing=again)
        (m,) = make_micro_batches(_samples(), 1000)
        _loss(critic, m, 10.0).backward()
        gradients.append(_gradients(critic.optimizer))
    assert _close(*gradients)


def test_the_backbone_is_the_model_in_path(model: Path, tmp_path: Path) -> None:
    wide = save_tiny_model(tmp_path, "llama", hidden_size=64)
    _, _, critic = _build(model, "own", path=str(wide))
    assert critic.model.head.weight.shape == (1, 64)
    (m,) = make_micro_batches(_samples(), 1000)
    assert bool(critic.values(m).isfinite().all())


def test_a_backbone_that_knows_fewer_tokens_is_an_error_that_names_it(model: Path, tmp_path: Path) -> None:
    small = save_tiny_model(tmp_path, vocab_size=VOCABULARY - 4)
    with pytest.raises(
        UserError, match=rf"critic\.path = {small} knows {VOCABULARY - 4} tokens, the policy {VOCABULARY}"
    ):
        _build(model, "own", path=str(small))


def _train(policy: Policy, optimizer: MasterOptimizer, critic: Critic, seed: int) -> None:
    for m in make_micro_batches(_samples(seed=seed), 40):
        output = policy.outputs(m)
        (-output.logprobs.mean() + _loss(critic, m, 10.0, output.hidden)).backward()
    optimizer.step(1e-3, 1.0)
    critic.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_steps_after_a_checkpoint_are_those_that_would_have_followed(
    model: Path, tmp_path: Path, backbone: str, dtype: torch.dtype
) -> None:
    first = _build(model, backbone, dtype, learning_rate=1e-3)
    _train(*first, seed=0)
    checkpoint.save(tmp_path, first[0].model, first[1], 1, str(model), first[2])
    second = _build(model, backbone, dtype, learning_rate=1e-3, head=False)
    _train(*second, seed=9)  # whatever it held before is gone
    assert checkpoint.load(tmp_path, second[1], second[2]) == 1
    for run in (first, second):
        _train(*run, seed=1)
    assert same_weights(first[1].state(), second[1].state())
    assert same_weights(first[2].state(), second[2].state())
    assert len(first[2].state()) == 4 * len(first[2].optimizer.masters)
    names = load_file(tmp_path / checkpoint.STATE).keys()
    assert {n for n in names if n.startswith("critic/")} == {f"critic/{n}" for n in first[2].state()}


def test_a_run_without_a_critic_reads_a_checkpoint_that_has_one(model: Path, tmp_path: Path) -> None:
    policy, optimizer, critic = _build(model, "own")
    _train(policy, optimizer, critic, seed=0)
    checkpoint.save(tmp_path, policy.model, optimizer, 1, str(model), critic)
    _, other, _ = _build(model, "own")
    assert checkpoint.load(tmp_path, other) == 1
    assert same_weights(optimizer.state(), other.state())


def test_a_run_with_a_critic_does_not_start_from_a_checkpoint_without(model: Path, tmp_path: Path) -> None:
    policy, optimizer, critic = _build(model, "shared")
    checkpoint.save(tmp_path, policy.model, optimizer, 0, str(model))
    before = _weights(optimizer)
    _train(policy, optimizer, critic, seed=0)
    with pytest.raises(UserError, match="written by a run without a critic, and this run has one") as caught:
        checkpoint.load(tmp_path, optimizer, critic)
    assert "\n" not in str(caught.value)
    assert not same_weights(before, _weights(optimizer))  # not half loaded


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_critic_with_another_backbone_does_not_take_the_checkpoint_s(
    model: Path, tmp_path: Path, backbone: str
) -> None:
    policy, optimizer, critic = _build(model, backbone)
    checkpoint.save(tmp_path, policy.model, optimizer, 0, str(model), critic)
    _, _, other = _build(model, "own" if backbone == "shared" else "shared")
    with pytest.raises(UserError, match="belongs to another critic"):
        checkpoint.load(tmp_path, optimizer, other)
