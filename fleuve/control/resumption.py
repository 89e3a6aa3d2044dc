"""What a controller makes of the past of its run: which answers it takes as they are, and which are sampled anew."""

from __future__ import annotations

from dataclasses import dataclass

from fleuve.config.settings import ControlSettings
from fleuve.control.answers import Answers
from fleuve.control.batching import surplus
from fleuve.control.past import Past
from fleuve.types import Group, Prompt


@dataclass(frozen=True)
class Resumption:
    """The groups alive, by id in order of admission: all `prompts`, those that are `ready`, and the `answers` that
    there are of the others, which run again. `live`: the version that no token of a group is older than."""

    prompts: dict[int, Prompt]
    ready: dict[int, Group]
    answers: dict[int, Answers]
    live: dict[int, int]


def resumption(past: Past, control: ControlSettings, use_answers: bool) -> Resumption:
    """Groups that were ready are so again; those that ran run again, with the answers that there are of them if
    `use_answers`, else by the version of now. So do those that would be trained staler than η: the step before was cut
    short, and took fewer than it should. Nor are answers used of weights that the run has not come to.
    """
    oldest = {i: group.oldest_version for i, group in past.ready.items()}
    for group, answers in past.answers.items() if use_answers else ():
        version, newest = answers.oldest_version, answers.newest_version
        if version is not None and newest is not None and newest <= past.version:
            oldest[group] = version
    deadlines = {i: version + control.max_staleness for i, version in oldest.items()}
    anew = surplus(deadlines, past.version, control.batch_size) if control.overdue == "wait" else set()
    kept = {i: version for i, version in oldest.items() if i not in anew}
    prompts = dict(sorted([*past.running.items(), *((i, g.prompt) for i, g in past.ready.items())]))
    return Resumption(
        prompts=prompts,
        ready={i: group for i, group in past.ready.items() if i in kept},
        answers={i: answers for i, answers in past.answers.items() if i in kept},
        live={i: kept.get(i, past.version) for i in prompts},
    )
