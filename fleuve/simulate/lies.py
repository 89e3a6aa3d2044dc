"""Replies that no model of this run can have sampled: of a worker that runs another model, or a broken one."""

from __future__ import annotations

import math

from fleuve.simulate.faults import Chance
from fleuve.simulate.ledger import VOCABULARY

KINDS = "lengths", "token", "logprob", "old", "new", "empty", "long"
"""Fields that do not fit together; a token that there is none of; a log-probability that is none; a version from before
the run's beginning; one that it has not come to. Of whole answers also: none at all, and more than was asked for."""

PARTIAL = 5
"""So many of them are of answers that are being sampled too."""

Reply = tuple[list[int], list[float], list[int]]
"""Tokens, log-probabilities and versions, each `[tokens]`."""


def falsified(reply: Reply, kind: str, chance: Chance, first: int, last: int, room: int) -> Reply:
    """`reply`, which is not empty, made one that cannot be.

    Args:
        first, last: the versions that the run begins and ends with.
        room: tokens that were asked for at most.
    """
    ids, logprobs, versions = list(reply[0]), list(reply[1]), list(reply[2])
    place = chance.pick(len(ids))
    match kind:
        case "lengths":
            del (logprobs if chance.pick(2) else versions)[-1]
        case "token":
            ids[place] = (-1, VOCABULARY)[chance.pick(2)]
        case "logprob":
            logprobs[place] = (0.5, math.nan, math.inf, -math.inf)[chance.pick(4)]
        case "old":
            versions[place] = first - 1
        case "new":
            versions[place] = last + 1
        case "empty":
            ids, logprobs, versions = [], [], []
        case "long":
            more = room + 1 - len(ids)
            ids, logprobs, versions = (
                ids + ids[-1:] * more,
                logprobs + logprobs[-1:] * more,
                versions + versions[-1:] * more,
            )
    return ids, logprobs, versions
