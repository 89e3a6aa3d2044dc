"""A packed sequence's log-probabilities are those it has alone, by the model's own implementation, in every family."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import FAMILIES, VOCABULARY, save_tiny_model
from transformers import AutoModelForCausalLM

from fleuve.modeling.loading import load_model
from fleuve.train.microbatch import Sample, make_micro_batches
from fleuve.train.policy import Policy

TEMPERATURE = 0.7


def _samples(lengths: list[int]) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for length in lengths:
        targets = np.arange(2, length, dtype=np.int32)
        zeros = np.zeros(len(targets), dtype=np.float32)
        tokens = rng.integers(3, VOCABULARY, length).astype(np.int32)
        samples.append(Sample(tokens=tokens, targets=targets, behaviour=zeros, versions=zeros.astype(np.int32)))
    return samples


def _alone(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """transformers' own forward, eager attention, one sequence."""
    tokens = torch.from_numpy(sample.tokens).long()
    logits = model(tokens[None]).logits[0] / TEMPERATURE
    targets = torch.from_numpy(sample.targets).long()
    return logits.log_softmax(-1)[targets - 1, tokens[targets]]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probabilities_and_gradients_are_those_of_each_sequence_alone(tmp_path: Path, family: str) -> None:
    path = save_tiny_model(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    policy = Policy(load_model(str(path), torch.float32), TEMPERATURE, chunk=7)
    samples = _samples([9, 23, 4, 17, 3])
    (micro_batch,) = make_micro_batches(samples, token_budget=100)
    packed, entropy = policy.logprobs(micro_batch, entropy=True)
    alone = torch.cat([_alone(reference, s) for s in samples])
    assert torch.allclose(packed, alone, atol=2e-5)
    assert alone.std() > 0.3  # far from uniform: a leak would show
    assert entropy is not None
    assert ((entropy > 0) & (entropy < np.log(VOCABULARY))).all()

    weight = torch.linspace(-1, 1, len(packed))
    (packed * weight).sum().backward()
    (alone * weight).sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-4, rtol=1e-4), name


def test_an_other_sequence_in_the_pack_changes_nothing(tmp_path: Path) -> None:
    policy = Policy(load_model(str(save_tiny_model(tmp_path)), torch.float32), 1.0, chunk=64)
    a, b, c = _samples([12, 15, 20])
    (first,) = make_micro_batches([a, b], token_budget=100)
    (second,) = make_micro_batches([a, c], token_budget=100)
    n = len(a.targets)
    assert torch.allclose(policy.logprobs(first)[0][:n], policy.logprobs(second)[0][:n], atol=1e-6)


def test_activation_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    path = str(save_tiny_model(tmp_path))
    plain = Policy(load_model(path, torch.float32), 1.0, chunk=8)
    sparing = Policy(load_model(path, torch.float32), 1.0, chunk=8, activation_checkpointing=True)
    (micro_batch,) = make_micro_batches(_samples([9, 23, 4]), token_budget=100)
    saved = {}
    for name, policy in (("plain", plain), ("sparing", sparing)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            logprobs, _ = policy.logprobs(micro_batch)
        logprobs.sum().backward()
        saved[name] = sum(kept)
    for (name, p), (_, q) in zip(plain.model.named_parameters(), sparing.model.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert saved["sparing"] < saved["plain"] / 2
