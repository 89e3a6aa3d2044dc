"""From a TOML file and dotted flags to settings, and back to TOML; every mistake becomes one clear line.

Paths inside a settings file are relative to the current directory, as those on the command line are.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fleuve.config.nearest import did_you_mean, nearest, nearest_path
from fleuve.config.settings import AlgorithmSettings, Settings, SftSettings
from fleuve.errors import UserError

S = TypeVar("S", bound=BaseModel)

PRESET = "algorithm.preset"

_TYPES = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "string_pattern_mismatch": 'an address, such as "http://HOST:PORT"',
    "tuple_type": 'a list, such as ["a", "b"]',
    "dict_type": "a table",
    "model_type": "a table",
}
_BOUNDS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "{} or more"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "{} or less"),
}


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a training run. `overrides` are command-line words: `--a.b value` or `--a.b=value`.

    Raises:
        UserError: one line a mistake: no such file, TOML syntax, unknown key, wrong type, value out of bounds.
    """
    settings = _load(Settings, Path(path), overrides)
    if settings.reward.path is not None or ":" not in settings.data.verifier:
        return settings
    # A reward function may lie beside the settings that name it. Said in the settings themselves, it also holds for
    # the copy of them that a run keeps elsewhere.
    reward = settings.reward.model_copy(update={"path": str(Path(path).parent)})
    return settings.model_copy(update={"reward": reward})


def load_sft_settings(path: str | Path, overrides: Sequence[str] = ()) -> SftSettings:
    """The settings of a supervised run; as `load_settings`."""
    return _load(SftSettings, Path(path), overrides)


def is_sft(path: str | Path) -> bool:
    """Whether a file describes a supervised run: it says where the model is saved.

    Raises:
        UserError: see `read_toml`.
    """
    model = read_toml(Path(path)).get("model")
    return isinstance(model, dict) and "save" in model


def parse_overrides(words: Sequence[str], model: type[BaseModel] = Settings) -> dict[str, Any]:
    """Dotted flags to `{"a.b": value}`. A value is read as TOML where that is possible, unless the setting is a string.

    Raises:
        UserError: a word that is no flag, or a flag without a value.
    """
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise UserError(f"unexpected argument {word!r}; settings are given as --section.key value")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{key} needs a value, as in --{key} VALUE")
            text = rest.pop(0)
        values[key] = _parse_value(text, _annotation(model, key))
    return values


def setting_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a settings class, tables left out."""
    names = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        names += setting_names(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return names


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file.

    Raises:
        UserError: it is missing (names the nearest file), unreadable, or not TOML (names the line).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}{did_you_mean(nearest_path(path, ['.toml']))}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory, not a settings file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        match = re.fullmatch(r"(.*?) \(at (?:line (\d+), column \d+|end of document)\)", str(error), re.DOTALL)
        what, line = match.groups() if match else (str(error), None)
        place = f", line {line}" if line else ""
        raise UserError(f"{path}{place}: not valid TOML: {what[:1].lower()}{what[1:]}") from None


def dump_settings(settings: BaseModel) -> str:
    """Settings as TOML; loading it gives equal settings. Every value is written, those at their default too."""
    return "\n".join(_toml_table(settings.model_dump(exclude_none=True), ())).strip() + "\n"


def dump_changes(settings: Settings) -> str:
    """As `dump_settings`, but only what is not at its default: for people to read."""
    changes = settings.model_dump(exclude_none=True, exclude_defaults=True)
    if settings.algorithm.preset != AlgorithmSettings().preset:  # other defaults then
        changes["algorithm"] = settings.algorithm.model_dump(exclude_none=True)
    return "\n".join(_toml_table(changes, ())).strip() + "\n"


def settings_from(model: type[S], values: dict[str, Any], words: Sequence[str], origin: str) -> S:
    """Settings from a table of values and the flags that override them; `origin` is what errors call the table.

    Raises:
        UserError: one line a mistake.
    """
    overrides = parse_overrides(words, model)
    if PRESET in overrides:
        _forget_preset(values)
    for key, value in overrides.items():
        _put(values, key, value)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _explain(detail, model, origin, overrides)]
        raise UserError("\n".join(dict.fromkeys(lines))) from None


def _forget_preset(values: dict[str, Any]) -> None:
    """Take out of `[algorithm]` what is there only because its own preset says so. Another preset, chosen by a flag,
    can then take effect even on the resolved settings of a run, in which every value is written."""
    table = values.get("algorithm")
    if not isinstance(table, dict):
        return
    try:
        implied = AlgorithmSettings.model_validate({"preset": table.get("preset", "grpo")}).model_dump()
    except ValidationError:
        return
    values["algorithm"] = {key: value for key, value in table.items() if key not in implied or value != implied[key]}


def _load(model: type[S], path: Path, words: Sequence[str]) -> S:
    return settings_from(model, read_toml(path), words, str(path))


def _explain(detail: ErrorDetails, model: type[BaseModel], file: str, overrides: Mapping[str, Any]) -> list[str]:
    """A line for one of pydantic's complaints: where, what, and the nearest right thing. Several lines where several
    flags are to blame: each of those below a table that there is not."""
    key = ".".join(str(part) for part in detail["loc"])
    kind = detail["type"]
    below = [name for name in overrides if name.startswith(f"{key}.")]
    if below and kind == "extra_forbidden":
        return [f"--{name}: unknown setting{_flag_meant(name, model)}" for name in below]
    if below and key in setting_names(model):  # a value, taken for a table
        return [f"--{name}: unknown setting{did_you_mean(f'--{key}')}" for name in below]
    flag = next((name for name in overrides if key == name or key.startswith(f"{name}.")), None)
    if kind == "value_error" and flag is None:  # of several settings together: the flags among them were the change
        named = [
            f"--{name}" for name in overrides if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", detail["msg"])
        ]
        return [f"{', '.join(named) or file}: {detail['ctx']['error']}"]
    if kind == "extra_forbidden":
        return [
            f"--{key}: unknown setting{_flag_meant(key, model)}"
            if flag
            else f"{file}: unknown key {key}{did_you_mean(_nearest_key(key, model))}"
        ]
    return [_explain_value(detail, key, file, f"--{flag}" if flag else file)]


def _flag_meant(key: str, model: type[BaseModel]) -> str:
    suggestion = _nearest_key(key, model)
    return did_you_mean(suggestion and f"--{suggestion}")


def _explain_value(detail: ErrorDetails, key: str, file: str, place: str) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "missing":
        return f"{file}: {key} is missing; it has no default"
    if kind == "value_error":
        return f"{place}: {context['error']}"
    shown = f"{key} = {_toml_value(value)}" if value is not None else key
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        must = f"must be {choices[0]}" if len(choices) == 1 else f"must be one of {', '.join(choices)}"
        return f"{place}: {shown}: {must}{did_you_mean(nearest(str(value), choices))}"
    if kind in _BOUNDS:
        name, phrase = _BOUNDS[kind]
        return f"{place}: {shown}: must be {phrase.format(f'{context[name]:g}')}"
    return f"{place}: {shown}: must be {_TYPES[kind]}" if kind in _TYPES else f"{place}: {shown}: {detail['msg']}"


def _nearest_key(key: str, model: type[BaseModel]) -> str | None:
    """The known setting that a wrong key most likely means: misspelt in its table, right name in the wrong table, or
    else a similar one."""
    names = setting_names(model)
    neighbours = [name for name in names if name.rpartition(".")[0] == key.rpartition(".")[0]]
    tables = sorted({name.rpartition(".")[0] for name in names} - {""})
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
    similar_leaf = nearest(leaf, {name.rpartition(".")[2] for name in names}, cutoff=0.75)
    return (
        nearest(key, neighbours, cutoff=0.85)
        or (nearest(key, same_leaf, cutoff=0.0) if same_leaf else None)
        or nearest(key, [*names, *tables], cutoff=0.75)
        or next((name for name in names if similar_leaf and name.rpartition(".")[2] == similar_leaf), None)
    )


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _annotation(model: type[BaseModel], key: str) -> Any:
    """The declared type of a dotted key; None if there is no such key."""
    head, _, tail = key.partition(".")
    field = model.model_fields.get(head)
    if field is None:
        return None
    section = _section(field.annotation)
    if section and tail:
        return _annotation(section, tail)
    return None if tail else field.annotation


def _is_string(annotation: Any) -> bool:
    """Whether a setting takes only text: `str`, `str | None`, or a Literal of strings."""
    if annotation is str:
        return True
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple or not arguments:
        return False
    return all(a is str or a is type(None) or isinstance(a, str) for a in arguments)


def _parse_value(text: str, annotation: Any) -> Any:
    if _is_string(annotation):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, leaf = key.split(".")
    for table in tables:
        inner = values.get(table)
        if not isinstance(inner, dict):
            inner = values[table] = {}
        values = inner
    values[leaf] = value


# --- writing TOML ---------------------------------------------------------------------------------------------------


def _toml_table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in table.items() if not isinstance(v, dict)]
    if path and (lines or not table):
        lines.insert(0, f"\n[{'.'.join(map(_toml_key, path))}]")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _toml_table(value, (*path, key))
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_string(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _toml_string(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else _unicode_escape(c)) for c in text) + '"'


def _unicode_escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
