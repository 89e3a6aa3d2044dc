"""The command line. Every command imports what it needs when it runs, so that `fleuve check` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from fleuve.errors import UserError
from fleuve.launch.fleet_command import fleet

app = typer.Typer(
    name="fleuve",
    help="Asynchronous reinforcement learning for language models that reason.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(fleet)

# Everything after CONFIG is kept as it stands: dotted flags, read by config.loader.
_DOTTED = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file of settings.")]


def main() -> NoReturn:
    """Run the command. A UserError is printed, a line each, and the exit code is 2."""
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


@app.command(context_settings=_DOTTED)
def train(
    context: typer.Context,
    config: Config,
    resume: Annotated[
        str, typer.Option(help="auto: go on with the run that is there; no: begin anew; or a checkpoint to begin from.")
    ] = "auto",
) -> None:
    """Train by asynchronous RL, or go on with the run that is there: the same command does both.

    Any setting can follow as a flag: --control.max_staleness 0.
    """
    from fleuve.config.loader import load_settings
    from fleuve.config.preflight import preflight
    from fleuve.rewards.sandbox.level import TITLE

    resume, flags = _take(_flags(context, str(config)), "--resume", resume)
    settings = load_settings(config, flags)
    for line in preflight(settings):
        # Who runs programs that a model wrote is told at every start what keeps them in.
        if line.startswith(("note: ", f"ok: {TITLE}")):
            print(line, file=sys.stderr)
    from fleuve.launch.train import run_training

    sys.exit(run_training(settings, resume))


@app.command(context_settings=_DOTTED)
def check(context: typer.Context, config: Config) -> None:
    """Say what `train` (or `sft`) would find wrong with CONFIG, or what it would do; starts nothing."""
    flags = _flags(context, str(config))
    from fleuve.config.loader import is_sft, load_settings, load_sft_settings
    from fleuve.config.preflight import preflight, preflight_sft

    if is_sft(config):
        lines = preflight_sft(load_sft_settings(config, flags))
    else:
        lines = preflight(load_settings(config, flags))
    for line in lines:
        print(line)


@app.command(context_settings={**_DOTTED, "allow_interspersed_args": True})
def doctor(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A TOML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds for each look at GPUs and collectives.", min=1)] = 90.0,
) -> None:
    """Examine this machine, or the nodes of a Ray cluster, before a run; exit code 1 if it could not go well.

    Any setting can follow as a flag, such as --launch.backend ray.
    """
    flags = _flags(context, *([str(config)] if config else []))
    from fleuve.doctor.command import doctor_command, load

    sys.exit(doctor_command(load(config, flags), as_json, deadline))


@app.command(context_settings=_DOTTED)
def sft(context: typer.Context, config: Config) -> None:
    """Train on demonstrations: the supervised start before RL. Settings can follow as flags, as with `train`."""
    from fleuve.config.loader import load_sft_settings
    from fleuve.config.preflight import preflight_sft

    settings = load_sft_settings(config, _flags(context, str(config)))
    preflight_sft(settings)
    from fleuve.contracts import RunError
    from fleuve.train.sft import run_sft

    try:
        run_sft(settings)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model directory, a hub name, or builtin:NAME.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of weights and KV cache.")] = "float32",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to torch.", min=0)] = 0,
    max_running: Annotated[int, typer.Option(help="Sequences generated at the same time.", min=1)] = 128,
    kv_cache_tokens: Annotated[int, typer.Option(help="Size of the KV cache.", min=1)] = 65536,
    prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens computed in one step.", min=1)] = 4096,
    weights: Annotated[Path | None, typer.Option(help="Directory that new weights may be read from.")] = None,
) -> None:
    """Serve MODEL over HTTP: the rollout interface, and OpenAI-compatible completions beside it.

    To let other machines in, with --host, set FLEUVE_TOKEN (or FLEUVE_TOKEN_FILE, to a file that holds it): clients
    show it as OpenAI's show their key.
    """
    from fleuve.config.models import inspect_model

    inspect_model(model, key="MODEL")
    from fleuve.engine.options import EngineOptions
    from fleuve.engine.serving import serve as run_server

    options = EngineOptions(
        model=model,
        dtype=dtype,
        device=device,
        threads=threads,
        max_running=max_running,
        kv_cache_tokens=kv_cache_tokens,
        prefill_tokens=prefill_tokens,
        weights=None if weights is None else str(weights.resolve()),
    )
    run_server(options, host, port)


@app.command(name="eval", context_settings=_DOTTED)
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, a hub name, or builtin:NAME.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A .jsonl file, or procedural:NAME?key=value&...")],
) -> None:
    """Measure MODEL on DATA: accuracy and pass@k.

    Flags come after DATA: --samples N (answers to each problem), --temperature T (0 is greedy), --limit N
    (problems), --seed N, --output FILE (where every answer goes), --by FIELD (the numbers for each of its values too),
    and the settings of data, rollout and reward, such as --rollout.max_new_tokens 512 or --data.prompt_field question.
    """
    flags = _flags(context, model, data)
    from fleuve.evaluate.command import eval_settings, run_eval, table

    settings = eval_settings(model, data, {}, flags)
    from fleuve.contracts import RolloutError
    from fleuve.launch.process import ChildError
    from fleuve.rewards.process import CrashError

    try:
        with _progress_bar() as progress:
            result = run_eval(settings, progress)
    except (ChildError, CrashError, RolloutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        where = f"; the answers scored so far are in {settings.output}" if settings.output else ""
        print(f"interrupted{where}", file=sys.stderr)
        sys.exit(130)
    print(table(result, settings))


rewards = typer.Typer(help="Score answers for runs on other machines.", no_args_is_help=True)
app.add_typer(rewards, name="rewards")


@rewards.callback()
def _rewards() -> None:
    """Score answers for runs on other machines."""


@rewards.command(name="serve", context_settings={**_DOTTED, "allow_interspersed_args": True})
def serve_rewards(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8100,
    verifier: Annotated[list[str] | None, typer.Option(help="One more verifier to offer; may be repeated.")] = None,
    log: Annotated[Path | None, typer.Option(help="File that gets what verifiers print.")] = None,
) -> None:
    """Serve the verifiers over HTTP, to runs with reward.url = "http://HOST:PORT".

    The settings of the processes follow as flags, such as --reward.workers 16 --reward.deadline 10. If the environment
    has FLEUVE_REWARDS_TOKEN, clients have to have the same.
    """
    from fleuve.rewards.command import serve_command

    serve_command(host, port, verifier or [], log, _flags(context))


@app.command(name="simulate", context_settings={**_DOTTED, "allow_interspersed_args": True})
def simulate_run(
    context: typer.Context,
    config: Config,
    compare: Annotated[bool, typer.Option("--compare", help="Compare synchronous and asynchronous systems.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw where the time goes.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timeline, as in a run.")] = None,
) -> None:
    """Say what a run of CONFIG would do, in virtual time, on the cluster that its table "simulate" says.

    Any setting can follow as a flag, such as --simulate.gpus 128 --control.max_staleness 8.
    """
    flags = _flags(context, str(config))
    from fleuve.config.loader import load_settings
    from fleuve.simulate.simulate_command import simulate_command

    with _failing():
        simulate_command(load_settings(config, flags), compare, plot, trace)


@app.command(context_settings={**_DOTTED, "allow_interspersed_args": True})
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalogued name (qwen-7b), or a model's directory.")],
    gpus: Annotated[int, typer.Option(help="Devices in all.", min=1)],
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)],
    answer: Annotated[int, typer.Option(help="Tokens of the longest answer.", min=1)],
    batch: Annotated[int, typer.Option(help="Prompts of a step.", min=1)],
    hardware: Annotated[str, typer.Option(help="What the devices are: a100, h100, h800, h200, cpu.")] = "h100",
    group_size: Annotated[int, typer.Option(help="Answers to each prompt.", min=1)] = 16,
    steps: Annotated[int, typer.Option(help="Steps of the run.", min=1)] = 250,
    max_staleness: Annotated[int, typer.Option(help="The most staleness that is acceptable.", min=1)] = 8,
    layouts: Annotated[int, typer.Option(help="Splits that are simulated, of all that look good.", min=1)] = 4,
    sensitivity: Annotated[bool, typer.Option(help="Whether to simulate other lengths of answers too.")] = True,
    data: Annotated[str | None, typer.Option(help="Prompts, for the written file.")] = None,
    write: Annotated[Path | None, typer.Option(help="Settings file to write the best plan to.")] = None,
) -> None:
    """Search how to share devices out for a run: what fits in memory, and is fastest.

    Any setting can follow as a flag, such as --simulate.lengths.mean 6000 --control.overdue train.
    """
    flags = _flags(context, model)
    from fleuve.simulate.plan_command import plan_command
    from fleuve.simulate.planned_run import planned_run

    settings = planned_run(model, gpus, hardware, prompt, answer, batch, group_size, steps, data, flags)
    with _failing():
        plan_command(settings, max_staleness, layouts, sensitivity, write)


@app.command(name="replay-step")
def replay_step(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a file of its failed/.")],
    step: Annotated[int | None, typer.Option(help="Which failed step; the newest if not given.", min=1)] = None,
) -> None:
    """Take a step again that had a NaN or an infinity in it, and show which answer and token it came from."""
    from fleuve.train.replay_command import replay_step as replay

    print(replay(path, step))


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """Sum a run up in a table, and draw RUN/report.png."""
    from fleuve.observe.report import report as print_report

    print_report(run)


@app.command()
def fetch(
    name: Annotated[Literal["smollm2"], typer.Argument(help="Which model.")],
    to: Annotated[Path | None, typer.Option(help="Directory to write; the default is where the example looks.")] = None,
) -> None:
    """Fetch a real language model once and convert it to a Hugging Face directory."""
    from fleuve.modeling.smollm2 import fetch as fetch_smollm2

    directory = fetch_smollm2(to) if to else fetch_smollm2()
    print(f"{name} is in {directory}")


def _flags(context: typer.Context, *positional: str) -> list[str]:
    """The flags after the positional arguments; `--help` among them prints the command's help."""
    if "--help" in [*positional, *context.args]:
        print(context.get_help())
        raise typer.Exit
    if misplaced := next((word for word in positional if word.startswith("-")), None):
        names = " ".join(
            p.metavar or str(p.name).upper() for p in context.command.params if p.param_type_name == "argument"
        )
        raise UserError(f"flags come last: fleuve {context.info_name} {names} {misplaced} ...")
    return list(context.args)


def _take(flags: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """The value of the flag `name` among the words that follow CONFIG, and the others."""
    rest, value = [], default
    words = iter(flags)
    for word in words:
        if word == name:
            value = next(words, "")
            if not value:
                raise UserError(f"{name} needs a value, as in {name} auto")
        elif word.startswith(f"{name}="):
            value = word.removeprefix(f"{name}=")
        else:
            rest.append(word)
    return value, rest


@contextmanager
def _failing() -> Iterator[None]:
    """What ends a run without a fault in Fleuve is one line, with exit code 1."""
    from fleuve.contracts import RunError

    try:
        yield
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Shows (done, of) in a terminal; None where there is none."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("answers", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


if __name__ == "__main__":
    main()
