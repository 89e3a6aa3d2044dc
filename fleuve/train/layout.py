"""Which part of every tensor of a model each rank of a trainer holds.

Without tensor parallelism: some rows. With it, ranks are a table of `count / tensor` rows and `tensor` columns, rank
after rank along the rows. What a layer splits is cut into as many parts as there are columns, along its first or its
second dimension, and of each part the ranks of the column hold some rows each. What a layer does not split, the ranks
of each column share out among themselves, so that every column has it. What lies outside layers is shared out to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Box = tuple[slice, ...]
"""One slice a dimension."""


@dataclass(frozen=True)
class Layout:
    """How a model lies on `count` ranks, `tensor` of which share a layer. `split` names all parameters of layers where
    they do: the dimension along which each is cut, None for one that every column has."""

    count: int = 1
    tensor: int = 1
    split: Mapping[str, int | None] = field(default_factory=dict)

    def box(self, name: str, shape: Sequence[int], rank: int) -> Box:
        """The part of parameter `name`, `shape` in all, that `rank` holds.

        Example:
            >>> Layout(4, 2, {"w": 1}).box("w", (6, 8), rank=3)
            (slice(3, 6, None), slice(4, 8, None))
        """
        box = [slice(0, n) for n in shape]
        if name not in self.split:
            box[0] = rows_of(shape[0], rank, self.count)
            return tuple(box)
        row, column = divmod(rank, self.tensor)
        dimension = self.split[name]
        if dimension is not None:
            each = shape[dimension] // self.tensor
            box[dimension] = slice(column * each, (column + 1) * each)
        first = box[0].start
        rows = rows_of(box[0].stop - first, row, self.count // self.tensor)
        box[0] = slice(first + rows.start, first + rows.stop)
        return tuple(box)

    def whole(self, name: str, shapes: Sequence[Sequence[int]]) -> list[int]:
        """The shape of parameter `name`, of whose parts the ranks hold `shapes`."""
        column = shapes[:: self.tensor] if name in self.split else shapes
        shape = [sum(part[0] for part in column), *column[0][1:]]
        dimension = self.split.get(name)
        if dimension is not None:
            shape[dimension] *= self.tensor
        return shape

    def counts(self, name: str, rank: int) -> bool:
        """Whether `rank`'s part of parameter `name` is its own: of those that all columns have, the first's."""
        return rank % self.tensor == 0 or self.split.get(name, 0) is not None


def rows_of(rows: int, rank: int, count: int) -> slice:
    """Which rows of a tensor `rank` holds: those that FSDP2 gives it, `torch.chunk`'s."""
    each = -(-rows // count)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def overlap(box: Box, other: Box) -> Box | None:
    """What two boxes have in common, if anything."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, other, strict=True))
    return common if all(s.start < s.stop for s in common) else None


def within(box: Box, outer: Box) -> Box:
    """`box` as counted from the beginning of `outer`, which it lies in."""
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in zip(box, outer, strict=True))
