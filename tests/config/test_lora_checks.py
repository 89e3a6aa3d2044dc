"""What is said of `[lora]` before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checked import Make, notes, problems
from pydantic import ValidationError
from safetensors.numpy import save_file

from fleuve.config.changes import Changes
from fleuve.config.lora import LoraSettings, lora_problems
from fleuve.config.models import inspect_model
from fleuve.config.preflight import preflight


@pytest.fixture
def layered(model: Path) -> Path:
    """The sound run's model, with an embedding, a head, and two layers of three matrices and a norm."""
    tensors = {"model.embed_tokens.weight": (9, 16), "lm_head.weight": (9, 16)}
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{name}.weight": (16, 16) for name in ("q_proj", "v_proj")}
        tensors |= {f"model.layers.{layer}.mlp.up_proj.weight": (32, 16), f"model.layers.{layer}.norm.weight": (16,)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, model / "model.safetensors")
    return model


def test_layers_that_the_model_has_are_no_problem(make: Make, layered: Path) -> None:
    assert not [n for n in notes(make(lora={"rank": 8, "modules": ["q_proj", "up_proj"]})) if "lora" in n]
    assert lora_problems(LoraSettings(rank=8), inspect_model(str(layered))) == []


def test_what_learns_is_said(make: Make, layered: Path) -> None:
    said = [line for line in preflight(make(lora={"rank": 8})) if "adapters" in line]
    assert said == [
        "ok: adapters of rank 8 (alpha 32) learn, and are all that is published: all linear layers but the output head"
    ]
    assert not [line for line in preflight(make()) if "adapters" in line]


def test_a_rank_that_no_matrix_has_is_a_note(make: Make, layered: Path) -> None:
    assert not [n for n in notes(make(lora={"rank": 16})) if "lora" in n]
    (note,) = [n for n in notes(make(lora={"rank": 17})) if "lora" in n]
    assert note.startswith("lora.rank = 17: no matrix that has adapters is of a rank above 16;")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qproj", "; did you mean q_proj?"),
        ("embed_tokens", "; it has q_proj, up_proj, v_proj"),
        ("lm_head", "; it has q_proj, up_proj, v_proj"),
        ("norm", "; it has q_proj, up_proj, v_proj"),
    ],
)
def test_other_layers_are_named_with_the_nearest_that_there_is(make: Make, layered: Path, name: str, hint: str) -> None:
    lora = {"rank": 8, "modules": ["v_proj", name]}
    assert problems(make(lora=lora)) == [f'lora.modules: the model has no linear layers called "{name}"{hint}']


def test_without_peft_one_line_says_how_to_get_it(make: Make, layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = problems(make(lora={"rank": 8}))
    assert line == 'lora.rank needs peft, which is not installed: pip install "peft>=0.18.1"'


def test_settings_of_adapters_without_any_are_noted(make: Make) -> None:
    (note,) = (n for n in notes(make(lora={"alpha": 16.0})) if "lora" in n)
    assert note == "lora.alpha has no effect: lora.rank is 0, so all weights learn"


@pytest.mark.parametrize("trainer", [{"ranks": 2}, {"offload": True}])
def test_adapters_are_not_shared_out(make: Make, trainer: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match=r"adapters are not shared out; with lora\.rank = 8 a trainer has one rank"
    ):
        make(lora={"rank": 8}, trainer=trainer)


@pytest.mark.parametrize(("name", "new"), [("rank", 4), ("rank", 0), ("alpha", 8.0), ("modules", ["q_proj"])])
def test_a_run_goes_on_with_the_adapters_that_it_has(make: Make, name: str, new: object) -> None:
    (line,) = Changes(make(lora={"rank": 8}), make(lora={"rank": 8} | {name: new})).refused()
    assert line.startswith(f"lora.{name} was ")
