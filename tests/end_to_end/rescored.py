"""Every token that a run has trained, scored again with the weights of the version that it is stamped with."""

from __future__ import annotations

import numpy as np
import torch
from runs import Run

from fleuve.modeling.forward import hidden_states, logits
from fleuve.modeling.loading import load_model
from fleuve.train.attention import PackedAttention


@torch.no_grad()
def rescored(run: Run) -> tuple[float, int]:
    """The largest difference to a recorded log-probability, and how many answers are of several versions. The run has
    kept a checkpoint of every version."""
    models = {0: load_model("builtin:small", torch.float32)}
    models |= {int(p.name.split("-")[1]): load_model(str(p / "model"), torch.float32) for p in run.checkpoints}
    mixed, worst = 0, 0.0
    for _, group, answer in run.answers:
        prompt, output = group["prompt_ids"], answer["output_ids"]
        ids = torch.tensor(prompt + output)
        versions, recorded = np.asarray(answer["versions"]), np.asarray(answer["logprobs"])
        mixed += len(set(versions)) > 1
        for version in set(versions.tolist()):
            model = models[version]
            hidden = hidden_states(model, ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
            scores = torch.log_softmax(logits(model, hidden).float(), -1)[len(prompt) - 1 : -1]
            scored = scores[torch.arange(len(output)), ids[len(prompt) :]].numpy()
            worst = max(worst, float(np.abs(scored - recorded)[versions == version].max()))
    return worst, mixed
