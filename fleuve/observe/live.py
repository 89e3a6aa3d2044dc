"""What a run shows in the terminal: a live view where there is one, else one line a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleuve.config.settings import Settings

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTES = 4
_HISTORY = 600


class Progress(Protocol):
    """Either of the two."""

    def start(self) -> None: ...

    def step(self, metrics: Mapping[str, float]) -> None: ...

    def count(self, name: str, value: float) -> None: ...

    def activity(self, who: str, what: str) -> None: ...

    def note(self, message: str) -> None: ...

    def stop(self) -> None: ...


def view_for(settings: Settings, console: Console | None = None) -> Progress:
    """The live view if `observe.live` says so, or is `auto` and this is a terminal; else lines."""
    console = console or Console()
    live = settings.observe.live
    if live == "on" or (live == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveView(settings, console)
    return LineView(settings, console)


class LineView:
    """One compact line a step, and one a note."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console

    def start(self) -> None:
        pass

    def step(self, metrics: Mapping[str, float]) -> None:
        self._print(step_line(metrics, self._settings.steps))

    def count(self, name: str, value: float) -> None:
        pass

    def activity(self, who: str, what: str) -> None:
        pass

    def note(self, message: str) -> None:
        self._print(message)

    def stop(self) -> None:
        self._console.file.flush()

    def _print(self, line: str) -> None:
        self._console.file.write(line + "\n")
        self._console.file.flush()


class LiveView:
    """A panel that redraws itself four times a second: progress, curves, who is doing what, the latest notes."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._started = time.monotonic()
        self._solved: deque[float] = deque(maxlen=_HISTORY)
        self._staleness: deque[float] = deque(maxlen=_HISTORY)
        self._metrics: Mapping[str, float] = {}
        self._counts: dict[str, float] = {}
        self._activities: dict[str, tuple[str, float]] = {}
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=False)

    def start(self) -> None:
        self._live.start()

    def step(self, metrics: Mapping[str, float]) -> None:
        self._metrics = {**self._metrics, **metrics}
        if "reward/solved" in metrics:
            self._solved.append(metrics["reward/solved"])
        if "staleness/mean" in metrics:
            self._staleness.append(metrics["staleness/mean"])

    def count(self, name: str, value: float) -> None:
        self._counts[name] = value

    def activity(self, who: str, what: str) -> None:
        self._activities[who] = (what, time.monotonic())

    def note(self, message: str) -> None:
        self._notes.append(message)

    def stop(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def render(self) -> RenderableType:
        """The whole panel, from what has been reported so far."""
        parts: list[RenderableType] = [self._progress(), Text(), self._curves(), Text(), self._doing()]
        if self._notes:
            parts += [Text(), Text("\n".join(self._notes), style="dim", overflow="ellipsis", no_wrap=True)]
        title = f"[bold]fleuve[/bold]  {escape(self._settings.run_dir)}"
        return Panel(Group(*parts), title=title, title_align="left", border_style="blue", padding=(1, 2))

    def _progress(self) -> RenderableType:
        step, steps = int(self._metrics.get("step", 0)), self._settings.steps
        elapsed = time.monotonic() - self._started
        left = f"about {_duration(elapsed / step * (steps - step))} left" if 0 < step < steps else ""
        row = Table.grid(padding=(0, 2))
        row.add_row(f"step [bold]{step}[/bold]/{steps}", ProgressBar(steps, step, width=36), _duration(elapsed), left)
        return row

    def _curves(self) -> RenderableType:
        get = self._metrics.get
        bound = self._settings.control.max_staleness
        width = max(16, min(60, self._console.width - 62))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", min_width=10)
        table.add_column(no_wrap=True, width=width)
        table.add_column(no_wrap=True)
        table.add_row(
            "solved",
            Text(sparkline(self._solved, width, 0.0, 1.0), style="green"),
            f"{get('reward/solved', 0):.2f}   reward {get('reward/mean', 0):.2f}   "
            f"length {get('response/length_mean', 0):.0f}",
        )
        table.add_row(
            "staleness",
            Text(sparkline(self._staleness, width, 0.0, max(bound, 1)), style="yellow"),
            f"mean {get('staleness/mean', 0):.2f}   max {get('staleness/max', 0):.0f} of {bound}   "
            f"interrupted {get('rollout/interrupted', 0):.0f}",
        )
        generated = self._counts.get("throughput/generated_tokens_per_second", 0.0)
        table.add_row(
            "tokens/s",
            "",
            f"trained {get('throughput/trained_tokens_per_second', 0):,.0f}   generated {generated:,.0f}",
        )
        return table

    def _doing(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", min_width=10)
        table.add_column(no_wrap=True)
        now = time.monotonic()
        for who, (what, since) in sorted(self._activities.items(), key=lambda item: (item[0] != "trainer", item[0])):
            table.add_row(escape(who), f"{escape(what)}  [dim]{now - since:.0f} s[/dim]")
        running, ready = self._counts.get("rollout/running", 0), self._counts.get("rollout/ready", 0)
        slots = (self._settings.control.max_staleness + 1) * self._settings.control.batch_size
        table.add_row("groups", f"{running:.0f} running   {ready:.0f} ready   {slots} slots")
        return table


def step_line(metrics: Mapping[str, float], steps: int) -> str:
    """A step on one line; what is not among the metrics is left out."""
    width = len(str(steps))
    words = [f"step {int(metrics['step']):>{width}}/{steps}"]
    if "reward/solved" in metrics:
        words.append(f"solved {metrics['reward/solved']:.2f}")
    if "reward/mean" in metrics:
        words.append(f"reward {metrics['reward/mean']:.2f}")
    if "response/length_mean" in metrics:
        words.append(f"length {metrics['response/length_mean']:.0f}")
    if "staleness/mean" in metrics:
        words.append(f"staleness {metrics['staleness/mean']:.2f} (max {metrics.get('staleness/max', 0):.0f})")
    if metrics.get("rollout/interrupted"):
        words.append(f"interrupted {metrics['rollout/interrupted']:.0f}")
    if "throughput/trained_tokens_per_second" in metrics:
        words.append(f"{metrics['throughput/trained_tokens_per_second']:.0f} tokens/s")
    words += [f"{name[5:]} {value:.3f}" for name, value in metrics.items() if is_headline(name)]
    if "time/elapsed" in metrics:
        words.append(_duration(metrics["time/elapsed"]))
    return "  ".join(words)


def is_headline(name: str) -> bool:
    """Whether a metric is what an evaluation is about: `eval/<set>/pass@k`."""
    return name.startswith("eval/") and "/pass@" in name


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """`values` as `width` blocks at most, each the mean of as many values as it takes; `low` is the lowest block."""
    values = list(values)  # another thread may add to them meanwhile
    if not values:
        return ""
    blocks = min(width, len(values))
    line = ""
    for i in range(blocks):
        part = values[i * len(values) // blocks : (i + 1) * len(values) // blocks]
        share = (sum(part) / len(part) - low) / (high - low)
        line += _BLOCKS[min(max(int(share * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]
    return line


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
