"""`fleuve plan`: how to share devices out for a run. Arithmetic picks the most promising plans, simulation judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleuve.config.settings import Settings
from fleuve.contracts import RunError
from fleuve.errors import UserError
from fleuve.simulate.candidates import Candidate, Misfit, largest_size, longest_sequence, staleness_below
from fleuve.simulate.engine_costs import EngineCosts, model_shape_of
from fleuve.simulate.estimate import Estimate, Work, estimate, work_of
from fleuve.simulate.hardware import load_hardware
from fleuve.simulate.layout import layout_of
from fleuve.simulate.lengths import DEFAULT_MEAN
from fleuve.simulate.planned_run import shares_gpus
from fleuve.simulate.result import SimulationResult
from fleuve.simulate.run import simulate
from fleuve.simulate.screen import Screened, fits, fitting, screen
from fleuve.simulate.window import warmup_steps

CLOSE = 0.02
"""Plans whose predictions differ by less are taken to be as fast as each other; the less stale one is the better."""

COUNTED_ANSWERS = 40_000
"""Answers of the steady state that one prediction looks at, in `FEWEST` to `MOST` steps."""

FEWEST, MOST = 4, 12

MOST_GPUS = 8192
"""Where the search ends, also that for what would fit."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """One way to do it: the settings that say so, what arithmetic made of it, and what the simulation did."""

    candidate: Candidate
    settings: Settings
    estimate: Estimate
    result: SimulationResult

    @property
    def hours(self) -> float:
        return self.result.hours


@dataclass(frozen=True)
class Sensitivity:
    """Hours of the best plan and of the runner-up if answers are not as assumed."""

    assumption: str
    best: float
    runner_up: float | None


@dataclass(frozen=True)
class Planned:
    """`plans` are of different splits, the fastest first; `staleness` has the hours of the best one under
    each bound that was looked at; `synchronous` is the fastest that waits for every batch."""

    plans: list[Plan]
    staleness: dict[int, float]
    synchronous: Plan | None
    sensitivity: list[Sensitivity]

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def runner_up(self) -> Plan | None:
        return self.plans[1] if len(self.plans) > 1 else None


def find_plan(
    settings: Settings, most_stale: int, layouts: int = 4, sensitivity: bool = True, progress: Progress = lambda _: None
) -> Planned:
    """Search, with at most `most_stale` versions of staleness; the `layouts` most promising are simulated.

    Raises:
        UserError: nothing fits; says why, and what would. Or there are more devices than could have anything to do.
        RunError: a run of a plan would fail, as by a deadline among the settings that is too short.
    """
    _check_devices(settings, most_stale)
    work = work_of(settings)
    fit, nearest = fitting(settings, most_stale)
    if nearest is not None:
        raise UserError(refusal(settings, nearest))
    progress(f"{len(fit)} plans fit")
    search = _Search(settings, work, progress)
    own = [(candidate, run) for candidate, run in fit if not shares_gpus(run)]
    plans = search.all(screen(own or fit, work, layouts))
    staleness = {most_stale: plans[0].hours}
    chosen = most_stale
    for bound in staleness_below(most_stale)[1:]:
        staleness[bound] = search.with_staleness(plans[0], bound).hours
        if staleness[bound] > min(staleness.values()) * (1 + CLOSE):
            break
        chosen = bound
    if chosen != most_stale:
        plans = sorted((search.with_staleness(p, chosen) for p in plans), key=lambda plan: plan.hours)
    in_turn = [c.with_staleness(0) for c, _ in fit if c.rollout_gpus is None]
    synchronous = screen([(c, c.apply(settings)) for c in in_turn], work, 1)
    return Planned(
        plans=plans,
        staleness=staleness,
        synchronous=search.one(synchronous[0]) if synchronous else None,
        sensitivity=_sensitivity(plans[:2], progress) if sensitivity else [],
    )


def _check_devices(settings: Settings, most_stale: int) -> None:
    gpus, control, group = settings.simulate.gpus or 1, settings.control, settings.rollout.group_size
    if gpus > MOST_GPUS:
        raise UserError(f"--gpus {gpus}: plans are looked for on up to {MOST_GPUS} devices")
    in_flight = (most_stale + 1) * control.batch_size * group
    trained = control.batch_size // settings.trainer.minibatches * group
    useful = largest_size(settings) * (in_flight + trained)
    if gpus > useful:
        raise UserError(
            f"--gpus {gpus}: at most {in_flight:,} answers are generated and {trained:,} trained at a time, so that "
            f"devices beyond {useful:,} would have nothing to do; give fewer, or a larger --batch"
        )


class _Search:
    """Simulates each plan once."""

    def __init__(self, settings: Settings, work: Work, progress: Progress) -> None:
        self._settings, self._work, self._progress = settings, work, progress
        self._known: dict[Candidate, Plan] = {}

    def one(self, screened: Screened) -> Plan:
        plan = self._known.get(screened.candidate)
        if plan is None:
            settings = _finished(screened.settings)
            self._progress(describe(settings))
            try:
                plan = Plan(screened.candidate, settings, screened.estimate, simulate(settings))
            except RunError as error:
                raise RunError(f"{describe(settings)}: {error}") from None
            self._known[screened.candidate] = plan
        return plan

    def all(self, screened: Sequence[Screened]) -> list[Plan]:
        """The fastest first."""
        return sorted((self.one(s) for s in screened), key=lambda plan: plan.hours)

    def with_staleness(self, plan: Plan, most: int) -> Plan:
        candidate = plan.candidate.with_staleness(most)
        run = candidate.apply(self._settings)
        return self.one(Screened(candidate, run, estimate(run, self._work)))


def _finished(settings: Settings) -> Settings:
    """With a number of steps to simulate, and the engines' sizes where a real run reads them."""
    engine = EngineCosts.of(settings)
    counted = COUNTED_ANSWERS // (settings.control.batch_size * settings.rollout.group_size)
    warmup = warmup_steps(settings.control.max_staleness)
    steps = settings.simulate.steps or warmup + min(MOST, max(FEWEST, counted))
    rollout = {"kv_cache_tokens": engine.kv_capacity_tokens, "max_running": engine.max_running}
    return settings.model_copy(
        update={
            "simulate": settings.simulate.model_copy(update={"steps": steps}),
            "rollout": settings.rollout.model_copy(update=rollout),
        }
    )


def _sensitivity(plans: Sequence[Plan], progress: Progress) -> list[Sensitivity]:
    """Answers 30 % shorter and longer in the mean, and spread less and more."""
    lengths, longest = plans[0].settings.simulate.lengths, plans[0].settings.rollout.max_new_tokens
    if lengths.file is not None:
        return []
    mean = DEFAULT_MEAN * longest if lengths.mean is None else lengths.mean
    changes: list[tuple[str, dict[str, float]]] = [
        (f"mean {value:,.0f} ({change:+.0%})", {"mean": value})
        for change in (-0.3, 0.3)
        if 1 <= (value := mean * (1 + change)) <= longest
    ]
    changes += [
        (f"sigma {lengths.sigma * factor:.2g} ({factor - 1:+.0%})", {"sigma": lengths.sigma * factor})
        for factor in (0.7, 1.3)
        if lengths.sigma > 0
    ]
    rows = []
    for assumption, change in changes:
        progress(f"if answers have {assumption}")
        hours = [simulate(_with_lengths(plan.settings, change)).hours for plan in plans]
        rows.append(Sensitivity(assumption, hours[0], hours[1] if len(hours) > 1 else None))
    return rows


def _with_lengths(settings: Settings, change: dict[str, float]) -> Settings:
    lengths = settings.simulate.lengths.model_copy(update=change)
    return settings.model_copy(update={"simulate": settings.simulate.model_copy(update={"lengths": lengths})})


def describe(settings: Settings) -> str:
    """The plan in a few words."""
    layout, trainer = layout_of(settings), settings.trainer
    engines = f"{layout.engines} engines × {layout.tensor_parallel}"
    ranks = f"{layout.ranks} ranks × {layout.trainer_parallel}"
    where = f"{layout.gpus} GPUs in turn: {engines}, {ranks}" if layout.colocated else f"{engines} + {ranks}"
    return f"{where}, η {settings.control.max_staleness}, {trainer.token_budget:,} tokens"


def refusal(settings: Settings, nearest: Misfit) -> str:
    """One line: what does not fit, why the candidate that comes nearest does not, and what would."""
    hardware, gpus = load_hardware(settings.simulate.hardware), settings.simulate.gpus or 1
    what = f"{model_shape_of(settings).name} with sequences of {longest_sequence(settings):,} tokens"
    would = _what_would(settings)
    return f"{what} does not fit on {gpus} × {hardware.name}: {nearest.reason}; {would}"


def _what_would(settings: Settings) -> str:
    """The nearest that fits: more devices, or else shorter answers."""
    gpus, longest = settings.simulate.gpus or 1, settings.rollout.max_new_tokens
    if (needed := _devices_for(settings)) is not None:
        return f"{needed} of them would do"
    halves = [longest >> halvings for halvings in range(1, longest.bit_length())]
    for shorter in halves:
        if fits(_answering(settings, shorter)):
            return f"answers of {shorter:,} tokens would fit"
    for shorter in halves:
        if (needed := _devices_for(_answering(settings, shorter))) is not None:
            return f"answers of {shorter:,} tokens would fit on {needed} of them"
    return f"neither would more than {gpus} of them, nor shorter answers: try devices with more memory"


def _devices_for(settings: Settings) -> int | None:
    """How many more devices would be enough, to an eighth; None if no number is."""
    fewest = settings.simulate.gpus or 1
    if fewest >= MOST_GPUS or not fits(_on(settings, MOST_GPUS)):
        return None
    more = fewest * 2
    while more < MOST_GPUS and not fits(_on(settings, more)):
        more = min(2 * more, MOST_GPUS)
    low = max(fewest, more // 2)
    while more - low > max(1, low // 8):
        middle = (low + more) // 2
        low, more = (low, middle) if fits(_on(settings, middle)) else (middle, more)
    return more


def _answering(settings: Settings, longest: int) -> Settings:
    return settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"max_new_tokens": longest})})


def _on(settings: Settings, gpus: int) -> Settings:
    return settings.model_copy(update={"simulate": settings.simulate.model_copy(update={"gpus": gpus})})
