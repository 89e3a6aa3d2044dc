"""Python's search for cyclic garbage, made seldom.

With 50,000 answers in flight a controller holds millions of objects that live for minutes. By default Python looks for
cycles among the youngest after every 700 objects made and not freed, and among all of them again and again as these
grow: two thirds of the controller's time went into that, in pauses of up to two seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 50)
"""Objects made and not freed until the youngest are gone through; how many times that until the middle generation is,
and how many times that until all are (a second's hold-up). Garbage of a few ten megabytes may lie about meanwhile."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, `THRESHOLDS` hold; afterwards those of before."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
