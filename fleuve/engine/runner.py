"""One step on the device: pack the plan's chunks, run the model over them, sample where a plan says so."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fleuve.engine.attention import CacheAttention, ClassWork, Piece
from fleuve.engine.kv_cache import KVCache, Layout, Slab
from fleuve.engine.sampler import Draw, sample
from fleuve.engine.scheduler import Chunk, Move, Plan
from fleuve.engine.sequence import Sequence
from fleuve.errors import UserError
from fleuve.modeling.forward import agrees_with_own_forward, hidden_states, logits


class _Probe:
    """An attention that notes the shapes of every layer's keys and values."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)  # one token attends to itself alone


def cache_layout(model: torch.nn.Module) -> Layout:
    """What the model's layers keep in the cache, found by running one token through it.

    Raises:
        UserError: the model is of a kind that this engine does not serve.
    """
    probe = _Probe()
    name = type(model).__name__
    if not agrees_with_own_forward(model, probe):
        raise UserError(f"{name} does something to its logits that the embedded engine does not know")
    shapes = set(probe.shapes.values())
    if len(shapes) != 1 or sorted(probe.shapes) != list(range(len(probe.shapes))):
        raise UserError(f"{name}'s layers differ in the shape of their keys; the embedded engine needs them alike")
    return Layout(len(probe.shapes), *shapes.pop())


class Runner:
    """Owns the model and its KV cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        weights = model.get_input_embeddings().weight  # type: ignore[operator]
        self.model = model
        self.device: torch.device = weights.device
        self.cache = KVCache(cache_layout(model), weights.dtype, self.device)

    @torch.inference_mode()
    def move(self, moves: list[Move]) -> None:
        """Carry out moves between two steps."""
        self.cache.apply(moves)

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[tuple[Sequence, int, float]]:
        """Carry out one step; returns the sampled token and its log-probability for every chunk that samples."""
        self.cache.apply(plan.moves)
        if not plan.chunks:
            return []
        work, ordered = self._order(plan.chunks)
        tokens: list[int] = []
        sampling: list[Sequence] = []
        rows: list[int] = []
        positions: list[int] = []
        for chunk in ordered:
            if chunk.count == 1:
                tokens.append(chunk.sequence.tokens[chunk.start])
                positions.append(chunk.start)
            else:
                end = chunk.start + chunk.count
                tokens.extend(chunk.sequence.tokens[chunk.start : end])
                positions.extend(range(chunk.start, end))
            if chunk.samples:
                sampling.append(chunk.sequence)
                rows.append(len(tokens) - 1)
        packed = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(self.device)
        hidden = hidden_states(self.model, packed[0], packed[1], CacheAttention(work))
        if not sampling:
            return []
        if len(rows) < len(tokens):
            hidden = hidden.index_select(0, torch.tensor(rows, device=self.device))
        draws = [Draw(s.request.sampling, s.num_output) for s in sampling]
        return list(zip(sampling, *sample(logits(self.model, hidden), draws), strict=True))

    def _order(self, chunks: list[Chunk]) -> tuple[list[ClassWork], list[Chunk]]:
        """Chunks in the order that `CacheAttention` wants, and what each slab gets of them."""
        placed: dict[Slab, tuple[list[tuple[int, Chunk]], list[tuple[int, Chunk]]]] = {}
        for chunk in chunks:
            slab, row = self.cache.place(chunk.sequence)
            placed.setdefault(slab, ([], []))[chunk.count > 1].append((row, chunk))
        work: list[ClassWork] = []
        ordered: list[Chunk] = []
        for slab, (singles, longer) in placed.items():
            singles.sort(key=lambda x: x[0])
            pieces = [[Piece(row, c.start, c.count) for row, c in part] for part in (singles, longer)]
            work.append(ClassWork(slab, *pieces))
            ordered.extend(c for part in (singles, longer) for _, c in part)
        return work, ordered
