"""Algorithms by the names that people know, each as the few settings in which it differs from the defaults.

A preset only fills in what the settings file leaves open: `preset = "dapo"` with `clip_high = 0.3` is DAPO with that
clip. All of them use the same parts (`algorithms/`), so that any two settings can be combined; and all of them are
decoupled, that is, corrected for the policy that really sampled (`proximal`, `cap`), as their papers, which assume
fresh data, are not. docs/algorithms.md says where each comes from.
"""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "tis",
    "icepop",
    "m2po",
]

PRESETS: dict[Preset, dict[str, Any]] = {
    # Shao et al. 2024 (DeepSeekMath), with DAPO's asymmetric clip and mean over all tokens: the defaults.
    "grpo": {},
    # Yu et al. 2025: groups that tie are replaced, and answers that run into the limit are punished softly.
    "dapo": {"dynamic_sampling": True, "overlong_buffer": 0.2},
    # Liu et al. 2025 (Understanding R1-Zero-like training): no division by the spread, nor by an answer's own length.
    "dr_grpo": {"normalise": "none", "aggregation": "constant", "clip_high": 0.2},
    # Zheng et al. 2025: one ratio an answer, the geometric mean of its tokens', hence the far narrower clip.
    "gspo": {"objective": "gspo", "aggregation": "answer_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax 2025 (MiniMax-M1): the clip bounds a weight, and every token keeps its gradient. The bound of 5 is that of
    # Khatri et al. 2025 (ScaleRL).
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # Gao et al. 2025: a sigmoid in place of the clip.
    "sapo": {"objective": "sapo", "aggregation": "answer_mean"},
    # Ahmadian et al. 2024 (Back to basics): REINFORCE over whole answers, against the mean of the others.
    "rloo": {
        "baseline": "leave_one_out",
        "normalise": "none",
        "objective": "policy_gradient",
        "aggregation": "constant",
    },
    # Hu et al. 2025: REINFORCE with PPO's clip, advantages whitened over the batch; with `kl_coefficient`, KL is in the
    # reward. The second subtracts each group's mean first.
    "reinforce_pp": {"baseline": "none", "normalise": "batch", "clip_high": 0.2, "kl_in": "reward"},
    "reinforce_pp_baseline": {"baseline": "group", "normalise": "batch", "clip_high": 0.2},
    # Schulman et al. 2017, with λ = γ = 1 as for long answers with one reward at their end.
    "ppo": {"baseline": "critic", "normalise": "batch", "clip_high": 0.2},
    # Truncated importance sampling: no weight above 2.
    "tis": {"cap": "clamp", "cap_value": 2.0},
    # Ling team 2025: tokens whose weight is out of [0.5, 5] get no gradient.
    "icepop": {"cap": "mask", "cap_low": 0.5, "cap_value": 5.0},
    # Zheng et al. 2025 (Prosperity before collapse): the most extreme tokens are masked until the second moment of the
    # log-weights is small.
    "m2po": {"cap": "second_moment"},
}
