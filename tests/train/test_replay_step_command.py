"""`fleuve replay-step RUN` at the command line, on a step that failed in a run of a tiny model."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

from tiny import make_batch, make_trainer, save_tiny_model, settings_for

from fleuve.observe.failed import save_failed

ROOT = Path(__file__).parents[2]


def test_a_failed_step_is_shown_with_the_answer_and_the_token_that_it_failed_by(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    sections: dict[str, dict[str, object]] = {"algorithm": {"cap": "none"}}
    trainer = make_trainer(model, tmp_path / "w", **sections)
    trainer.step(make_batch())
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-000001"
    trainer.save(checkpoint)
    (checkpoint / "COMMITTED").touch()
    batch = make_batch(seed=1, version=1, oldest=1)
    bad = batch.groups[2].trajectories[0]
    bad.loss_mask[:] = True
    bad.logprobs[1] = math.nan
    result = trainer.step(batch)
    save_failed(run, settings_for(model, **sections).model_dump(mode="json"), batch, result.metrics)

    command = [sys.executable, "-m", "fleuve", "replay-step", str(run)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "step 2: 4 groups, 12 answers"
    assert lines[1] == f"weights: those that the step began with ({checkpoint})"
    assert sum(line.startswith("update ") for line in lines) == 2
    (update,) = [number for number, line in enumerate(lines) if line.endswith(": skipped")]
    assert lines[update].startswith("update 2: loss nan, gradient nan")
    first = lines[update + 2].split()  # below the head of the table
    assert first[:3] == ["102", batch.groups[2].prompt.id, "0"]
    assert " ".join(first).endswith(f"recorded log-probability nan of token 1 (id {bad.output_ids[1]}, version 1)")
