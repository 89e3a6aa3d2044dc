"""Settings files and flags: what loads, and the one line that each mistake gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleuve.config.loader import (
    dump_settings,
    load_settings,
    load_sft_settings,
    parse_overrides,
    setting_names,
)
from fleuve.config.settings import Settings
from fleuve.errors import UserError

MINIMAL = """\
run_dir = "runs/test"
[model]
path = "m"
[data]
train = "rows.jsonl"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "quickstart.toml"
    path.write_text(MINIMAL)
    return path


def error(path: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_settings(path, words)
    return str(caught.value).replace(f"{path.parent}/", "")


def with_text(path: Path, text: str) -> Path:
    path.write_text(MINIMAL + text)
    return path


def test_a_minimal_file_gets_every_default(config: Path) -> None:
    settings = load_settings(config)
    assert settings.model.path == "m"
    assert settings.control == Settings.model_fields["control"].default


def test_flags_override_the_file_in_both_spellings(config: Path) -> None:
    settings = load_settings(
        with_text(config, "[control]\nmax_staleness = 4\n"),
        ["--control.max_staleness", "0", "--steps=12", "--model.path", "7", "--rollout.stop", '["\\n"]'],
    )
    assert settings.control.max_staleness == 0
    assert settings.steps == 12
    assert settings.model.path == "7"
    assert settings.rollout.stop == ("\n",)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[control]\nmax_stalness = 1\n",
            "quickstart.toml: unknown key control.max_stalness; did you mean control.max_staleness?",
        ),
        ("[contrl]\nbatch_size = 4\n", "quickstart.toml: unknown key contrl; did you mean control?"),
        (
            "[trainer]\nbatch_size = 4\n",
            "quickstart.toml: unknown key trainer.batch_size; did you mean control.batch_size?",
        ),
        ("[control]\nxyzzy = 4\n", "quickstart.toml: unknown key control.xyzzy"),
        ("[control]\nmax_staleness = -1\n", "quickstart.toml: control.max_staleness = -1: must be 0 or more"),
        ("[rollout]\ntemperature = 0\n", "quickstart.toml: rollout.temperature = 0: must be more than 0"),
        ("[rollout]\ntop_p = 1.5\n", "quickstart.toml: rollout.top_p = 1.5: must be 1 or less"),
        ("[trainer]\nlearning_rate = inf\n", "quickstart.toml: trainer.learning_rate = inf: must be a finite number"),
        ('[control]\nbatch_size = "many"\n', 'quickstart.toml: control.batch_size = "many": must be a whole number'),
        ("[control]\nbatch_size = 2.5\n", "quickstart.toml: control.batch_size = 2.5: must be a whole number"),
        ('[observe]\ntrace = "perhaps"\n', 'quickstart.toml: observe.trace = "perhaps": must be true or false'),
        ('[rollout]\nstop = "x"\n', 'quickstart.toml: rollout.stop = "x": must be a list, such as ["a", "b"]'),
        (
            '[control]\noverdue = "wiat"\n',
            'quickstart.toml: control.overdue = "wiat": must be one of wait, mask, train, drop; did you mean wait?',
        ),
        (
            "[control]\nbatch_size = 10\n[trainer]\nminibatches = 4\n",
            "quickstart.toml: control.batch_size = 10 is not divisible by trainer.minibatches = 4; "
            "the nearest that divides it is trainer.minibatches = 5",
        ),
        (
            '[weights]\ntransport = "path"\n',
            'quickstart.toml: weights.transport = "path" needs weights.path, a directory that trainer and workers see',
        ),
        (
            "[control]\nmax_staleness = -1\noverdue = 'later'\n",
            "quickstart.toml: control.max_staleness = -1: must be 0 or more\n"
            'quickstart.toml: control.overdue = "later": must be one of wait, mask, train, drop',
        ),
    ],
)
def test_each_mistake_in_a_file_gives_its_line(config: Path, text: str, line: str) -> None:
    assert error(with_text(config, text)) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--control.max_stalness", "1"],
            "--control.max_stalness: unknown setting; did you mean --control.max_staleness?",
        ),
        (["--max_staleness", "1"], "--max_staleness: unknown setting; did you mean --control.max_staleness?"),
        (["--lora.ranks", "4"], "--lora.ranks: unknown setting; did you mean --lora.rank?"),
        (
            ["--trainer.ranks", "3", "--trainer.context_parallel", "2"],
            "--trainer.ranks, --trainer.context_parallel: trainer.ranks = 3 is not divisible by "
            "trainer.context_parallel = 2, the number of ranks that share each micro-batch",
        ),
        (["--run-dir", "x"], "--run-dir: unknown setting; did you mean --run_dir?"),
        (["--control.max_staleness", "-1"], "--control.max_staleness: control.max_staleness = -1: must be 0 or more"),
        (
            ["--contrl.max_staleness", "3"],
            "--contrl.max_staleness: unknown setting; did you mean --control.max_staleness?",
        ),
        (
            ["--contrl.overdue", "drop", "--contrl.batch_size", "3"],
            "--contrl.overdue: unknown setting; did you mean --control.overdue?\n"
            "--contrl.batch_size: unknown setting; did you mean --control.batch_size?",
        ),
        (["--a.b.c", "3"], "--a.b.c: unknown setting"),
        (["--steps.number", "3"], "--steps.number: unknown setting; did you mean --steps?"),
        (
            ["--control.batch_size.x", "3"],
            "--control.batch_size.x: unknown setting; did you mean --control.batch_size?",
        ),
        (
            ["--weights.transport", "path"],
            '--weights.transport: weights.transport = "path" needs weights.path, a directory that trainer and workers '
            "see",
        ),
        (["--control.max_staleness"], "--control.max_staleness needs a value, as in --control.max_staleness VALUE"),
        (["--observe.trace", "--steps", "3"], "--observe.trace needs a value, as in --observe.trace VALUE"),
        (["steps=3"], "unexpected argument 'steps=3'; settings are given as --section.key value"),
        (["--model", "small"], '--model: model = "small": must be a table'),
        (
            ["--reward.url", "localhost:8000"],
            '--reward.url: reward.url = "localhost:8000": must be an address, such as "http://HOST:PORT"',
        ),
    ],
)
def test_each_mistake_in_a_flag_gives_its_line(config: Path, words: list[str], line: str) -> None:
    assert error(config, *words) == line


def test_a_wrong_flag_and_a_wrong_key_in_the_file_each_get_their_own_blame(config: Path) -> None:
    with_text(config, "[contrl]\nbatch_size = 3\n")
    assert error(config) == "quickstart.toml: unknown key contrl; did you mean control?"
    assert error(config, "--cotrol.batch_size", "3").splitlines() == [
        "quickstart.toml: unknown key contrl; did you mean control?",
        "--cotrol.batch_size: unknown setting; did you mean --control.batch_size?",
    ]


def test_a_missing_setting_is_named(config: Path) -> None:
    config.write_text('run_dir = "r"\n[model]\npath = "m"\n[data]\n')
    assert error(config) == "quickstart.toml: data.train is missing; it has no default"


def test_a_missing_file_names_the_nearest(config: Path) -> None:
    assert error(config.with_name("quickstrat.toml")) == "no such file: quickstrat.toml; did you mean quickstart.toml?"


def test_a_file_that_only_shares_its_suffix_is_no_suggestion(config: Path) -> None:
    assert error(config.with_name("zebra.toml")) == "no such file: zebra.toml"


def test_toml_syntax_errors_name_the_line(config: Path) -> None:
    assert error(with_text(config, "[control\n")).startswith("quickstart.toml, line 6: not valid TOML: ")


def test_other_unreadable_files_are_clear_too(config: Path) -> None:
    config.write_bytes(b"\xff\xfe\x00")
    assert error(config) == "quickstart.toml: not a text file in UTF-8 (byte 0)"
    assert error(config.parent).endswith("is a directory, not a settings file")


def test_an_sft_file_loads_and_its_open_table_takes_any_key(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text(
        'run_dir = "r"\n[model]\nalphabet = "01"\nsave = "out"\n[model.config]\nmodel_type = "llama"\n'
        '[data]\ntrain = "procedural:chain"\n'
    )
    settings = load_sft_settings(path, ["--model.config.hidden_size", "64"])
    assert settings.model.config == {"model_type": "llama", "hidden_size": 64}
    again = tmp_path / "again.toml"
    again.write_text(dump_settings(settings))
    assert load_sft_settings(again) == settings


def test_an_sft_model_needs_exactly_one_source(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text('run_dir = "r"\n[model]\nsave = "out"\n[data]\ntrain = "procedural:chain"\n')
    with pytest.raises(UserError, match=r"sft\.toml: .*give either model\.path .* or model\.config"):
        load_sft_settings(path)


@given(
    text=st.text(alphabet=st.characters(codec="utf-8")),
    stop=st.lists(st.text(alphabet=st.characters(codec="utf-8"))),
    rate=st.floats(1e-12, 1e3),
    trace=st.booleans(),
)
def test_dumped_settings_load_as_themselves(
    tmp_path_factory: pytest.TempPathFactory, text: str, stop: list[str], rate: float, trace: bool
) -> None:
    settings = Settings.model_validate(
        {
            "run_dir": "r",
            "model": {"path": text},
            "data": {"train": "d", "instruction": text},
            "rollout": {"stop": stop},
            "trainer": {"learning_rate": rate},
            "observe": {"trace": trace},
        }
    )
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_text(dump_settings(settings), encoding="utf-8")
    assert load_settings(path) == settings


def test_every_setting_can_be_given_as_a_flag(config: Path) -> None:
    defaults = load_settings(config)
    words = []
    for name in setting_names(Settings):
        value: object = defaults
        for part in name.split("."):
            value = getattr(value, part)
        if value is not None:
            text = str(list(value)) if isinstance(value, tuple) else str(value)
            words += [f"--{name}", text.lower() if isinstance(value, bool) else text]
    assert len(words) > 100
    assert load_settings(config, words) == defaults
    assert len(parse_overrides(words)) == len(words) // 2
