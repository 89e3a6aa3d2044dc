"""Whether the books of a run balance: journal, metrics, rollouts, checkpoint and weights tell the same story."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from chaos_plan import BATCH, PROMPTS, STEPS, Plan

from fleuve.config.loader import load_settings
from fleuve.control.journal import Admitted, Dropped, Ready, Record, Step
from fleuve.control.past import Past
from fleuve.launch.checkpoints import Checkpoint, committed
from fleuve.launch.local import start_trainer
from fleuve.launch.placement import Place
from fleuve.train.client import TrainerClient
from fleuve.types import Batch

LARGEST_SHARE_EXCLUDED = 0.5


def violations(plan: Plan, run: Path, records: list[Record]) -> Iterator[str]:
    """What is not as it has to be after the last step. `records` are all of the journal."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rollouts = {path.name: _rows(path) for path in sorted((run / "rollouts").iterdir())}
    yield from ledger(records)
    yield from _reports(plan, metrics, rollouts, records)
    yield from _left_in(run)
    found = committed(run / "checkpoints")
    if not found or found[-1].version != STEPS:
        yield f"the last checkpoint is {found[-1].path.name if found else 'missing'}"
        return
    yield from _checkpoint(found[-1], records)
    if asyncio.run(retrained(run, batches(records))) != state_in(found[-1].path):
        yield "the weights are not those that the batches of the journal make"
    yield from _verdicts(plan, run, rollouts)


def ledger(records: list[Record]) -> Iterator[str]:
    """Every group admitted is trained once, or dropped once with a reason; every prompt is trained once a pass."""
    prompts: dict[int, str] = {}
    alive: set[int] = set()
    ready: set[int] = set()
    trained: list[int] = []
    version = 0
    for record in records:
        match record:
            case Admitted(group=group):
                if group != len(prompts):
                    yield f"group {group} was admitted behind {len(prompts)} others"
                prompts[group] = record.prompt.id
                alive.add(group)
            case Ready(group=group):
                if group not in alive:
                    yield f"group {group} finished, and was not running"
                ready.add(group)
            case Dropped(group=group, reason=reason):
                if group not in alive:
                    yield f"group {group} was dropped ({reason}), and was not alive"
                if not reason:
                    yield f"group {group} was dropped for no reason"
                alive.discard(group)
            case Step():
                version += 1
                if record.version != version:
                    yield f"step {record.version} came where {version} had to"
                could = ready & alive
                if not record.whole or len(record.groups) != BATCH or not set(record.groups) <= could:
                    yield f"step {version} trained {record.trained} of {record.groups}; ready were {sorted(could)}"
                alive -= set(record.trained)
                trained += record.trained
            case _:  # tells of a group that runs
                pass
    if version != STEPS:
        yield f"{version} steps were made"
    if alive:
        yield f"groups {sorted(alive)} were neither trained nor dropped"
    yield from _passes(Counter(prompts.get(group, "") for group in trained), records)


def _passes(trained: Counter[str], records: list[Record]) -> Iterator[str]:
    """A prompt whose group was dropped comes again; one that was given up for good is in `lost`."""
    prompts = {record.group: record.prompt.id for record in records if isinstance(record, Admitted)}
    lost = {prompts.get(record.group, "") for record in records if isinstance(record, Dropped) and not record.again}
    expected = {f"e{number}/{row}" for number in range(STEPS * BATCH // PROMPTS) for row in range(PROMPTS)}
    if twice := [prompt for prompt, count in trained.items() if count > 1]:
        yield f"prompts {twice} were trained more than once"
    if missing := expected - set(trained) - lost:
        yield f"prompts {sorted(missing)} were never trained"
    if len(set(trained) - expected) != len(lost & expected):
        yield f"prompts {sorted(set(trained) - expected)} were trained in place of {sorted(lost)}"


def _reports(
    plan: Plan, metrics: list[dict[str, Any]], rollouts: dict[str, list[dict[str, Any]]], records: list[Record]
) -> Iterator[str]:
    if [row["step"] for row in metrics] != list(range(1, STEPS + 1)):
        yield f"metrics.jsonl has the steps {[row['step'] for row in metrics]}"
    if [row["policy_version"] for row in metrics] != [row["step"] for row in metrics]:
        yield f"the policy versions are {[row['policy_version'] for row in metrics]}"
    if stalest := [row["step"] for row in metrics if row["staleness/max"] > plan.staleness]:
        yield f"steps {stalest} have tokens staler than {plan.staleness}"
    if list(rollouts) != [f"step-{step:06d}.jsonl" for step in range(1, STEPS + 1)]:
        yield f"rollouts/ has {list(rollouts)}"
    for step, rows in zip((r for r in records if isinstance(r, Step)), rollouts.values(), strict=False):
        if [row["group"] for row in rows] != step.groups:
            yield f"step {step.version} trained {step.groups}, and its rollouts are {[row['group'] for row in rows]}"
    for name, rows in rollouts.items():
        if any(a["versions"] != sorted(a["versions"]) for row in rows for a in row["trajectories"]):
            yield f"{name}: an answer whose versions go back"


def _checkpoint(checkpoint: Checkpoint, records: list[Record]) -> Iterator[str]:
    state = checkpoint.state()
    admitted = sum(isinstance(record, Admitted) for record in records)
    dropped = Counter(record.reason for record in records if isinstance(record, Dropped))
    counted = (state.version, state.admitted, state.trained, +Counter(state.dropped))
    if counted != (STEPS, admitted, STEPS * BATCH, dropped):
        yield f"the last checkpoint counts {counted}, the journal {(STEPS, admitted, STEPS * BATCH, dropped)}"
    if alive := list(checkpoint.records())[1:]:
        yield f"the last checkpoint has {len(alive)} groups that are still to be trained"


def _left_in(run: Path) -> Iterator[str]:
    if parts := sorted(str(path.relative_to(run)) for path in run.rglob("*.part")):
        yield f"half-written files are left: {parts}"
    if torn := [path.name for path in (run / "checkpoints").iterdir() if not (path / "COMMITTED").exists()]:
        yield f"half a checkpoint is left: {torn}"
    json.loads((run / "trace.json").read_text())


def batches(records: list[Record]) -> Iterator[Batch]:
    """Those of a whole journal, from the first step."""
    past = Past()
    for record in records:
        if (batch := past.apply(record)) is not None:
            yield batch


def state_in(checkpoint: Path) -> dict[str, bytes]:
    """The trainer's state: a file, or one for each rank."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("trainer*.safetensors")}


async def retrained(run: Path, made: Iterable[Batch]) -> dict[str, bytes]:
    """The trainer's state after the same steps, made by one of as many ranks that nothing happened to."""
    settings = load_settings(run / "config.toml")
    timeout = settings.trainer.step_timeout
    with tempfile.TemporaryDirectory() as scratch:
        there = Path(scratch)
        settings = settings.model_copy(update={"run_dir": str(there)})
        trainer = await start_trainer(settings, there, there / "weights", [Place(None, 1)] * settings.trainer.ranks)
        try:
            async with TrainerClient(trainer.url, timeout, trainer.token) as client:
                for batch in made:
                    await client.step(batch)
                await client.save(there / "checkpoint")
        finally:
            await trainer.stop(0.0)
        return state_in(there / "checkpoint")


def _verdicts(plan: Plan, run: Path, rollouts: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Whatever happened to those who score, a score is the true one, or there is none."""
    answers = [(row, answer) for rows in rollouts.values() for row in rows for answer in row["trajectories"]]
    scored = [(row, answer) for row, answer in answers if answer["reward"] is not None]
    if len(scored) < LARGEST_SHARE_EXCLUDED * len(answers):
        yield f"{len(answers) - len(scored)} of {len(answers)} answers have no verdict"
    if plan.verifier == "code":
        true = asyncio.run(_scores_of_programs(run, scored))
    else:
        from fleuve.rewards.math import verify_math

        true = [verify_math(answer["text"], row["answer"]) for row, answer in scored]
    for score, (row, answer) in zip(true, scored, strict=True):
        if answer["reward"] != score:
            yield f"group {row['group']}: an answer is worth {score}, and got {answer['reward']}: {answer['text']!r}"


async def _scores_of_programs(run: Path, scored: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[float | None]:
    from fleuve.data.open import open_source
    from fleuve.modeling.tokenizer import load_tokenizer
    from fleuve.rewards.pool import RewardPool

    settings = load_settings(run / "config.toml")
    data = str(run.parent / settings.data.train)
    source = open_source(data, settings.data, load_tokenizer(settings.model.path), settings.seed)
    async with RewardPool(settings.reward, ["code"]) as pool:
        jobs = [pool.score(source.prompt(row["prompt_id"]), answer["text"]) for row, answer in scored]
        return [verdict.score for verdict in await asyncio.gather(*jobs)]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
