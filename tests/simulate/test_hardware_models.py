"""The catalogue, and models read from their own configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fleuve.config.models import resolve_model
from fleuve.config.weight_files import _LENGTH
from fleuve.errors import UserError
from fleuve.simulate.hardware import CATALOGUE, hardware_names, load_hardware
from fleuve.simulate.model_shape import load_model_shape


def test_every_constant_of_the_hardware_says_where_it_comes_from() -> None:
    constants = [line for line in (CATALOGUE / "hardware.toml").read_text().splitlines() if re.match(r"\w+ +?=", line)]
    assert len(constants) >= 5 * len(hardware_names())
    assert [line for line in constants if not line.startswith("name") and len(line.partition("#")[2].strip()) < 5] == []


def test_every_device_of_the_catalogue_loads_and_bf16_is_faster_than_fp32() -> None:
    for name in hardware_names():
        device = load_hardware(name)
        assert device.peak["bfloat16"] > device.peak["float32"] > device.memory_bandwidth > device.network


def test_a_collective_over_several_nodes_goes_at_the_adapters_rate() -> None:
    a100 = load_hardware("a100")
    assert a100.fabric(8) == 300e9
    assert a100.fabric(16) == 8 * 25e9


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [  # parameters as the published safetensors files have them; 2 · layers · kv_heads · 128 · 2 bytes
        ("qwen-1.5b", 1_777_088_000, 28_672),
        ("qwen-7b", 7_615_616_512, 57_344),
        ("qwen-14b", 14_770_033_664, 196_608),
        ("qwen-32b", 32_763_876_352, 262_144),
    ],
)
def test_the_catalogues_models_have_the_published_sizes(name: str, parameters: int, kv_bytes: int) -> None:
    shape = load_model_shape(name)
    assert shape.parameters == parameters
    assert shape.kv_bytes("bfloat16") == kv_bytes
    assert shape.kv_bytes("float32") == 2 * kv_bytes


def test_a_shape_is_read_from_a_models_own_directory() -> None:
    shape = load_model_shape("builtin:small")
    weights = Path(resolve_model("builtin:small")) / "model.safetensors"
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(_LENGTH), "little")))
    stored = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            stored += count
    # Qwen3 also has a norm of queries and one of keys in every layer, which costs nothing worth a field.
    assert stored - shape.parameters == shape.layers * 2 * shape.head_dim


def test_defaults_of_a_configuration_are_those_of_transformers(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_model_shape(str(tmp_path))
    assert (shape.kv_heads, shape.head_dim, shape.tied, shape.attention_bias) == (4, 16, False, True)
    assert load_model_shape(str(tmp_path / "config.json")).parameters == shape.parameters


def test_an_unknown_device_or_model_is_one_line_that_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"simulate.hardware = h10: .*did you mean h100\?"):
        load_hardware("h10")
    with pytest.raises(UserError, match=r"simulate.model = qwen-7: .*did you mean qwen-7b\?"):
        load_model_shape("qwen-7")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ('{"hidden_size": 8, "num_attention_heads": 2}', "has no num_hidden_layers"),
        ('{"hidden_size": 8, "num_attention_heads": 2, "num_experts": 8}', "mixture of experts"),
        ("[1]", "no JSON object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_configuration_without_a_known_shape_is_one_line(tmp_path: Path, config: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=complaint) as error:
        load_model_shape(str(tmp_path))
    assert "\n" not in str(error.value)
