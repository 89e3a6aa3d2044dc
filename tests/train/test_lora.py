"""LoRA: the adapters learn, and nothing else; the policy is the base model with them merged in, everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import make_batch, make_trainer, same_weights, save_tiny_model, weights_of
from transformers import AutoModelForCausalLM

from fleuve.config.models import inspect_model
from fleuve.errors import UserError
from fleuve.modeling.loading import load_model
from fleuve.train import checkpoint
from fleuve.train.microbatch import make_micro_batches, sample_of
from fleuve.train.policy import Policy
from fleuve.train.trainer import Trainer
from fleuve.weights.adapters import adapters_of, merged

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _trained(model: Path, store: Path, steps: int = 2, **sections: dict[str, object]) -> Trainer:
    trainer = make_trainer(model, store, **{"lora": LORA, **sections})
    for step in range(steps):
        trainer.step(make_batch(seed=step, version=step))
    return trainer


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3, 4, 5, 9, 12, 20, 7]])).logits  # type: ignore[no-any-return]


def _logprobs(policy: Policy) -> torch.Tensor:
    answers = make_batch(seed=5).trajectories
    (m,) = make_micro_batches([sample_of(t, t.loss_mask) for t in answers], 10**6)
    with torch.no_grad():
        return policy.logprobs(m)[0]


def test_before_the_first_step_it_is_the_base_model_to_the_last_bit(model: Path, tmp_path: Path) -> None:
    adapted, plain = make_trainer(model, tmp_path / "a", lora=LORA), make_trainer(model, tmp_path / "b")
    assert torch.equal(_logprobs(adapted.policy), _logprobs(plain.policy))
    published = adapters_of(load_file(adapted.publish().path))
    base = dict(plain.model.named_parameters())
    assert all(torch.equal(merged(base[name], adapter), base[name]) for name, adapter in published.items())


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_all_linear_layers_but_the_head_have_adapters_and_nothing_else_moves(tmp_path: Path, family: str) -> None:
    path = save_tiny_model(tmp_path / "m", family)
    trainer = _trained(path, tmp_path / "w")
    layers = {name.split(".")[-4] for name in trainer.optimizer.masters}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    first = make_trainer(path, tmp_path / "b").model.state_dict()
    now = {n.replace(".base_layer.", "."): t for n, t in trainer.model.state_dict().items() if "lora_" not in n}
    assert now.keys() == first.keys()
    assert all(torch.equal(now[name], first[name]) for name in first)
    fresh = make_trainer(path, tmp_path / "c", lora=LORA).optimizer.masters
    assert all(not torch.equal(fresh[name], m) for name, m in trainer.optimizer.masters.items())


def test_named_layers_alone_have_adapters(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "w", lora={**LORA, "modules": ["q_proj", "down_proj"]})
    assert {name.split(".")[-4] for name in trainer.optimizer.masters} == {"q_proj", "down_proj"}
    with pytest.raises(UserError, match=r'no linear layers called "qproj"; did you mean q_proj\?'):
        make_trainer(model, tmp_path / "v", lora={**LORA, "modules": ["qproj"]})
    with pytest.raises(UserError, match=r'called "embed_tokens"; it has down_proj, gate_proj'):
        make_trainer(model, tmp_path / "u", lora={**LORA, "modules": ["embed_tokens"]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_merges_to_what_is_saved_and_is_small(model: Path, tmp_path: Path, dtype: str) -> None:
    types: dict[str, dict[str, object]] = {"trainer": {"dtype": dtype, "token_budget": 64}, "rollout": {"dtype": dtype}}
    trainer = _trained(model, tmp_path / "w", **types)
    trainer.save(tmp_path / "c")
    file, whole = trainer.publish(), make_trainer(model, tmp_path / "b", **types).publish()
    assert file.version == 2
    assert file.bytes < whole.bytes / 2
    saved = load_file(tmp_path / "c" / checkpoint.MODEL / "model.safetensors")
    base = {n: t.to(getattr(torch, dtype)) for n, t in load_file(model / "model.safetensors").items()}
    adapters = adapters_of(load_file(file.path))
    assert saved.keys() == base.keys()
    for name, tensor in base.items():
        expected = merged(tensor, adapters[name]) if name in adapters else tensor
        assert torch.equal(saved[name], expected), name
        assert (name in adapters) == (not torch.equal(tensor, expected))


def test_the_merged_model_computes_what_the_trainer_computes(model: Path, tmp_path: Path) -> None:
    trainer = _trained(model, tmp_path / "w", trainer={"learning_rate": 0.02})
    trainer.save(tmp_path / "c")
    saved = make_trainer(tmp_path / "c" / checkpoint.MODEL, tmp_path / "b")
    before = _logprobs(make_trainer(model, tmp_path / "d").policy)
    assert torch.allclose(_logprobs(saved.policy), _logprobs(trainer.policy), atol=1e-4)
    assert not torch.allclose(before, _logprobs(trainer.policy), atol=0.1)


def test_peft_opens_the_adapter_and_finds_the_same_logits(model: Path, tmp_path: Path) -> None:
    trainer = _trained(model, tmp_path / "w", trainer={"learning_rate": 0.02})
    trainer.save(tmp_path / "c")
    assert {p.name for p in (tmp_path / "c" / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = _logits(base)
    opened = PeftModel.from_pretrained(base, tmp_path / "c" / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "c" / checkpoint.MODEL)
    assert torch.allclose(_logits(opened), _logits(whole), atol=1e-4)
    assert not torch.allclose(plain, _logits(whole), atol=0.1)
    adapter = str(tmp_path / "c" / "adapter")
    for take_for_a_model in (lambda: load_model(adapter, torch.float32), lambda: inspect_model(adapter)):
        with pytest.raises(UserError, match=r"adapter is an adapter, not a model; did you mean .*/c/model\?"):
            take_for_a_model()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_loading_are_those_that_would_have_followed(model: Path, tmp_path: Path, dtype: str) -> None:
    sections: dict[str, dict[str, object]] = {"trainer": {"dtype": dtype}}
    first = _trained(model, tmp_path / "a", 1, **sections)
    first.save(tmp_path / "c")
    second = make_trainer(model, tmp_path / "b", lora=LORA, **sections)
    second.step(make_batch(seed=9))  # whatever it held before is gone
    second.load(tmp_path / "c")
    for trainer in (first, second):
        assert trainer.version == 1
        trainer.step(make_batch(seed=1, version=1))
    assert same_weights(first.optimizer.state(), second.optimizer.state())
    assert _same_files(first, second)


def test_a_trainer_that_begins_anew_makes_the_same_steps_by_the_seed(model: Path, tmp_path: Path) -> None:
    """As after a death before the first checkpoint: the steps on record lead to the same weights."""
    torch.manual_seed(1)
    first = _trained(model, tmp_path / "a")
    torch.manual_seed(2)
    second = _trained(model, tmp_path / "b")
    assert same_weights(weights_of(first), weights_of(second))
    assert _same_files(first, second)


def _same_files(first: Trainer, second: Trainer) -> bool:
    return Path(first.publish().path).read_bytes() == Path(second.publish().path).read_bytes()


def test_in_bf16_masters_are_fp32_and_the_base_has_none(model: Path, tmp_path: Path) -> None:
    trainer = _trained(model, tmp_path / "w", trainer={"dtype": "bfloat16"})
    assert {m.dtype for m in trainer.optimizer.masters.values()} == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    state = trainer.optimizer.state()
    assert all("lora_" in name for name in state)
    assert sum(p.numel() for p in trainer.model.parameters() if p.requires_grad) == sum(
        t.numel() for name, t in state.items() if name.startswith("master/")
    )


def test_activation_checkpointing_changes_nothing(model: Path, tmp_path: Path) -> None:
    plain = _trained(model, tmp_path / "a")
    again = _trained(model, tmp_path / "b", trainer={"activation_checkpointing": True})
    for name, weight in weights_of(plain).items():
        assert torch.allclose(weight, weights_of(again)[name], atol=1e-6), name


def test_the_reference_is_the_base_model_without_a_second_one(model: Path, tmp_path: Path) -> None:
    """KL in the loss: as with the same model opened a second time, from another directory."""
    copy = save_tiny_model(tmp_path / "copy")
    kl: dict[str, object] = {"kl_coefficient": 0.5}
    own = _trained(model, tmp_path / "a", algorithm=kl)
    other = _trained(model, tmp_path / "b", algorithm=kl | {"reference": str(copy)})
    assert own.reference is not None
    assert own.reference.model is own.model
    assert other.reference is not None
    assert other.reference.model is not other.model
    base = make_trainer(model, tmp_path / "c")
    assert torch.equal(_logprobs(own.reference), _logprobs(base.policy))
    assert not torch.equal(_logprobs(own.policy), _logprobs(base.policy))
    assert same_weights(weights_of(own), weights_of(other))
    without = _trained(model, tmp_path / "d")
    assert not same_weights(weights_of(own), weights_of(without))


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_learns_beside_adapters(model: Path, tmp_path: Path, backbone: str) -> None:
    """On its own backbone all of it learns; on the policy's the head, and the adapters by the value loss too."""
    sections: dict[str, dict[str, object]] = {
        "algorithm": {"preset": "ppo"},
        "critic": {"backbone": backbone, "learning_rate": 1e-2, "coefficient": 1.0},
    }
    trainer = _trained(model, tmp_path / "a", **sections)
    trainer.save(tmp_path / "c")
    assert trainer.critic is not None
    assert bool(trainer.critic.model.head.weight.detach().any())
    resumed = make_trainer(model, tmp_path / "b", lora=LORA, **sections)
    resumed.load(tmp_path / "c")
    results = [t.step(make_batch(seed=3, version=2)) for t in (trainer, resumed)]
    assert results[0].advantages == results[1].advantages
    assert same_weights(weights_of(trainer), weights_of(resumed))
