"""Where data sheets say nothing of use: times that were measured before, or else a warning."""

from __future__ import annotations

from fleuve.config.settings import Settings
from fleuve.config.simulation import MeasuredSettings
from fleuve.simulate.hardware import catalogue_times


def with_known_times(settings: Settings) -> tuple[Settings, str]:
    """`settings` with the catalogue's times where it has any for their hardware and model and they give none of their
    own; and in one line what the user should know of it, empty if nothing. Only a CPU needs them: there it is the
    interpreter that takes the time.
    """
    simulate = settings.simulate
    if simulate.measured != MeasuredSettings():
        return settings, ""
    hardware, model = simulate.hardware.lower(), simulate.model or settings.model.path
    times = catalogue_times().get(hardware, {}).get(model)
    if times is not None:
        update = {"measured": MeasuredSettings.model_validate(times)}
        known = settings.model_copy(update={"simulate": simulate.model_copy(update=update)})
        return known, (
            f"times of {model} were measured on Fleuve's own machine, one core of an AMD EPYC; for yours: "
            "benchmarks/calibrate.py"
        )
    if hardware == "cpu":
        return settings, (
            f"on a CPU a data sheet says little of how long {model} takes, and these figures can be wrong tenfold: "
            "measure [simulate.measured] with benchmarks/calibrate.py, or set simulate.hardware to a GPU"
        )
    return settings, ""
