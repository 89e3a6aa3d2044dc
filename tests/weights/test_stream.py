"""A safetensors file that is written as its tensors come is one that the library itself reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fleuve.weights import stream
from fleuve.weights.stream import write_tensors

KINDS = {
    "matrix": torch.randn(5, 7),
    "bf16": torch.randn(3, 1, 2).to(torch.bfloat16),
    "half": torch.randn(9).to(torch.float16),
    "double": torch.randn(2, 2).double(),
    "a number": torch.tensor(2.5),
    "nothing": torch.zeros(0, 4),
    "transposed": torch.randn(4, 6).T,
    "with gradient": torch.randn(3).requires_grad_(),
    'odd "name" \u00e9': torch.ones(1),
}


@pytest.mark.parametrize(
    ("room", "short"),
    [(1 << 18, 0), (64, 0), (1 << 18, 1 << 24)],
    ids=["enough room", "a header that outgrows its room", "a short file"],
)
def test_the_library_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, short: int
) -> None:
    monkeypatch.setattr(stream, "ROOM", room)
    monkeypatch.setattr(stream, "SHORT", short)
    path = tmp_path / "w.safetensors"
    write_tensors(path, KINDS.items(), {"version": "3"})
    read = load_file(path)
    assert set(read) == set(KINDS)
    for name, tensor in KINDS.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor.detach())
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"version": "3"}
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_short_file_has_no_room_to_spare(tmp_path: Path) -> None:
    write_tensors(tmp_path / "w", [("a", torch.ones(10))], {})
    assert (tmp_path / "w").stat().st_size < 200


def test_no_tensor_is_held_once_it_is_written(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i in range(20):
            tensor = torch.full((1000,), float(i))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            yield f"t{i}", tensor

    write_tensors(tmp_path / "w", tensors(), {})
    assert most <= 3
    assert load_file(tmp_path / "w")["t7"][0] == 7.0


def test_what_is_no_weight_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ids is torch\.int64"):
        write_tensors(tmp_path / "w", [("ids", torch.zeros(3, dtype=torch.int64))], {})
