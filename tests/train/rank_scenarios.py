"""What the tests of ranks have several of them do. Each is called on every rank; what it returns is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import make_batch, save_tiny_model, settings_for

from fleuve.train.anchors import Anchors
from fleuve.train.ranks import Ranks
from fleuve.train.trainer import Trainer
from fleuve.types import Batch
from fleuve.weights.store import WeightStore

TRAINER = {"learning_rate": 1e-3, "token_budget": 64, "logprob_chunk": 16, "minibatches": 2}
EPS = {"eps": 1e-4}
"""AdamW's: large enough that a rounding error in a tiny gradient stays one in the weights."""


def _trainer(ranks: Ranks, place: Path, family: str = "qwen3-tied", **sections: dict[str, object]) -> Trainer:
    model = place / "model"
    if not model.exists() and ranks.leads:
        save_tiny_model(place / "model.part", family)
        (place / "model.part").rename(model)
    ranks.any(True)  # wait until it is there
    sections["trainer"] = TRAINER | EPS | sections.get("trainer", {})
    return Trainer(settings_for(model, **sections), None, ranks)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in trainer.optimizer.weights(torch.float32)}


def _batch(version: int, groups: int = 5) -> Batch:
    return make_batch(seed=version, groups=groups, version=version, oldest=max(0, version - 2))


def _steps(trainer: Trainer, count: int) -> dict[str, Any]:
    results = [trainer.step(_batch(trainer.version)) for _ in range(count)]
    metrics = [_timeless(r.metrics) for r in results]
    return {"metrics": metrics, "advantages": [r.advantages for r in results], "weights": _weights(trainer)}


def everything(ranks: Ranks, place: Path) -> Any:
    """Five steps with all that is added up over ranks: second moments, KL in the loss, entropies, batch statistics."""
    algorithm: dict[str, object] = {
        "cap": "second_moment",
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "baseline": "leave_one_out",
        "normalise": "batch",
    }
    return _steps(_trainer(ranks, place, algorithm=algorithm), 5)


def kl_in_reward(ranks: Ranks, place: Path) -> Any:
    """Values that each rank computes some of and all need; layers recomputed; buffers beside the weights."""
    algorithm: dict[str, object] = {"kl_coefficient": 0.1, "kl_in": "reward"}
    recomputed: dict[str, object] = {"activation_checkpointing": True}
    return _steps(_trainer(ranks, place, "gemma3", algorithm=algorithm, trainer=recomputed), 2)


def long_sequences(ranks: Ranks, place: Path) -> Any:
    """Two ranks to a micro-batch: everything of which only one of the two counts, and layers recomputed."""
    algorithm: dict[str, object] = {"cap": "second_moment", "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    recomputed: dict[str, object] = {"activation_checkpointing": True}
    return _steps(_trainer(ranks, place, "gemma3", algorithm=algorithm, trainer=recomputed), 3)


def long_untied(ranks: Ranks, place: Path) -> Any:
    """An output head of its own, sequence ratios, and values that each context computes some of; few targets."""
    algorithm: dict[str, object] = {"objective": "gspo", "kl_coefficient": 0.1, "kl_in": "reward", "cap": "mask"}
    algorithm |= {"cap_level": "sequence"}
    trainer = _trainer(ranks, place, "mistral-window", algorithm=algorithm, trainer={"token_budget": 20})
    for _ in range(2):
        batch = _batch(trainer.version)
        for t in batch.trajectories:
            t.loss_mask[: len(t.loss_mask) // 2] = False  # a first part may have no target at all
        result = trainer.step(batch)
    return {"metrics": [_timeless(result.metrics)], "weights": _weights(trainer)}


def biased(ranks: Ranks, place: Path) -> Any:
    """Biases of what is cut along either dimension."""
    return _steps(_trainer(ranks, place, "llama-biased"), 2)


def _timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def half_precision(ranks: Ranks, place: Path) -> Any:
    return _steps(_trainer(ranks, place, trainer={"dtype": "bfloat16"}), 3)


def one_token_chunks(ranks: Ranks, place: Path) -> Any:
    """The gradient of an output head that is computed in as many chunks as there are tokens, in half precision."""
    sections: dict[str, object] = {"dtype": "bfloat16", "logprob_chunk": 1}
    trainer = _trainer(ranks, place, "llama", trainer=sections)
    batch = _batch(0)
    first, *_ = trainer._minibatches(batch, trainer._credits(batch))
    none: list[torch.Tensor | None] = [None] * len(first.micro_batches)
    trainer._accumulate(first, Anchors(none, none), 0.0, None)
    trainer.optimizer.norm()
    return trainer.optimizer.masters["lm_head.weight"].grad


def few_sequences(ranks: Ranks, place: Path) -> Any:
    """One answer with anything to learn in each minibatch: most ranks have nothing."""
    trainer = _trainer(ranks, place, algorithm={"entropy_coefficient": 0.01})
    batch = make_batch(seed=3, groups=2, size=1)
    result = trainer.step(batch)
    sizes = [len(m.micro_batches) for m in trainer._minibatches(batch, trainer._credits(batch))]
    return {"metrics": result.metrics, "weights": _weights(trainer), "sizes": sizes}


def not_a_number(ranks: Ranks, place: Path) -> Any:
    """One token of one answer: the rank that has it must not be the only one to skip the update."""
    trainer = _trainer(ranks, place, algorithm={"cap": "none"})
    before = _weights(trainer)
    batch = _batch(0)
    broken = batch.groups[0].trajectories[0]
    broken.logprobs[:] = math.nan
    broken.loss_mask[:] = True
    result = trainer.step(batch)
    return {"metrics": result.metrics, "version": result.version, "before": before, "weights": _weights(trainer)}


def interrupted(ranks: Ranks, place: Path) -> Any:
    """Rank 0 is told so in the middle of its second minibatch."""
    trainer = _trainer(ranks, place, trainer={"token_budget": 24})
    batch = _batch(0)
    passes = 0
    outputs = trainer.policy.outputs

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal passes
        passes += torch.is_grad_enabled()
        if ranks.leads and passes == sizes[0] + 1:
            trainer.interrupted.set()
        return outputs(*given, **more)

    sizes = [len(m.micro_batches) for m in trainer._minibatches(batch, trainer._credits(batch))]
    trainer.policy.outputs = counted  # type: ignore[method-assign]
    cut = trainer.step(batch)
    trainer.interrupted.clear()
    trainer.policy.outputs = outputs  # type: ignore[method-assign]
    after = trainer.step(_batch(1))
    return {"trained": cut.trained, "sizes": sizes, "passes": passes, "after": after.metrics["loss/grad_norm"]}


def saved(ranks: Ranks, place: Path) -> Any:
    """Two steps, a checkpoint, a publication, and the step after."""
    trainer = _trainer(ranks, place)
    _steps(trainer, 2)
    mesh = f"{ranks.count}x{ranks.context}x{ranks.tensor}"
    trainer.save(place / mesh)
    trainer.store = WeightStore(place / f"weights-{mesh}", 2) if ranks.leads else None
    file = trainer.publish()
    before = _weights(trainer)
    return {"published": file, "saved": before, **_steps(trainer, 1)}


def resumed(ranks: Ranks, place: Path) -> Any:
    """The step after, from the checkpoints of all meshes."""
    found = {}
    for origin in sorted((place.parent / "saved").glob("[0-9]*x*x*")):
        trainer = _trainer(ranks, place)
        trainer.load(origin)
        found[origin.name] = {"version": trainer.version, **_steps(trainer, 1)}
    return found


def not_writable(ranks: Ranks, place: Path) -> Any:
    """A checkpoint that one rank alone cannot write: all say so, and go on. Weights that cannot be published, too."""
    trainer = _trainer(ranks, place)
    path = place / f"checkpoint-{ranks.count}"
    path.mkdir(exist_ok=True)
    if ranks.rank == ranks.count - 1:
        (path / f"trainer-{ranks.rank + 1:05d}-of-{ranks.count:05d}.safetensors.part").mkdir()
    ranks.any(True)
    said = ""
    try:
        trainer.save(path)
    except OSError as error:
        said = str(error)
    if ranks.leads:
        trainer.store = WeightStore(place / "weights", 2)
        (place / "weights" / "weights-00000000.part").mkdir()
    unpublished = ""
    try:
        trainer.publish()
    except OSError as error:
        unpublished = str(error)
    return {
        "unpublished": unpublished,
        "said": said,
        "left": sorted(p.name for p in path.glob("*.safetensors")),
        **_steps(trainer, 1),
    }


SCENARIOS: dict[str, Callable[[Ranks, Path], Any]] = {
    f.__name__: f
    for f in (
        everything,
        kl_in_reward,
        long_sequences,
        long_untied,
        biased,
        half_precision,
        one_token_chunks,
        few_sequences,
        not_a_number,
        interrupted,
        saved,
        resumed,
        not_writable,
    )
}
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "ranks": {
        "everything": ("0", "2"),
        "long_sequences": ("0", "2x2"),
        "few_sequences": ("0", "2"),
        "not_a_number": ("0", "2"),
        "interrupted": ("2",),
        "saved": ("0", "2"),
        "resumed": ("0", "2"),
        "not_writable": ("2",),
    },
    "rank_meshes": {
        "everything": ("0", "4", "2x1x2"),
        "kl_in_reward": ("0", "2"),
        "long_untied": ("0", "4x2"),
        "half_precision": ("0", "2"),
        "one_token_chunks": ("0", "1"),
        "saved": ("0", "2"),
        "resumed": ("4",),
    },
    "tensor": {
        "everything": ("0", "4x1x2"),
        "kl_in_reward": ("0", "2x1x2"),
        "long_sequences": ("0", "4x2x2"),
        "long_untied": ("0", "2x1x2"),
        "biased": ("0", "2x1x2"),
        "half_precision": ("0", "2x1x2"),
        "few_sequences": ("0", "2x1x2"),
        "interrupted": ("2x1x2",),
        "saved": ("0", "2", "2x1x2", "4x1x2"),
        "resumed": ("0", "2", "4", "2x1x2", "4x1x2"),
    },
}
"""On which meshes scenarios are played; see `in_ranks`."""
