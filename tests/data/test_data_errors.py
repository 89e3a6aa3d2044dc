"""Every kind of bad data is one line that says what, where, and the nearest right thing."""

from pathlib import Path

import pytest

from fleuve.config.settings import DataSettings
from fleuve.data.open import load_prompts, open_demonstrations, open_source, read_rows
from fleuve.data.render import prompt_text
from fleuve.data.rows import Row
from fleuve.errors import UserError

GOOD = b'{"prompt": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD * 16 + b'{"prompt": "1+1?" "answer": "2"}\n', "train.jsonl:17: not valid JSON (Expecting ',' delimiter"),
        (GOOD + b"\n\n" + b'{"prompt": \n', "train.jsonl:4: not valid JSON"),
        (GOOD + b"\xff\xfe", "train.jsonl:2: not UTF-8"),
        (GOOD + b"[1, 2]\n", "train.jsonl:2: a row is a JSON object, this is a list"),
        (GOOD + b"[" * 100_000 + b"\n", "train.jsonl:2: not valid JSON (nested too deeply)"),
        (b"", "train.jsonl: the data set is empty"),
        (b"\n \n", "train.jsonl: the data set is empty"),
        (
            b'{"prompt": "1+1?", "anser": "2"}\n',
            'train.jsonl:1: no field "answer"; it has "prompt", "anser"; did you mean "anser"?',
        ),
        (GOOD + b"{}\n", 'train.jsonl:2: no field "prompt"; it has no fields at all'),
        (b'{"prompt": "1+1?", "answer": null}\n', 'train.jsonl:1: field "answer" is null, not a text or number'),
        (b'{"prompt": "1+1?", "answer": true}\n', 'field "answer" is true or false, not a text or number'),
        (b'{"prompt": "1+1?", "answer": " "}\n', 'train.jsonl:1: field "answer" is empty'),
        (b'{"prompt": "1+1?", "answer": NaN}\n', 'train.jsonl:1: field "answer" is nan, not a text or a finite number'),
        (b'{"prompt": "1+1?", "answer": -1e999}\n', 'train.jsonl:1: field "answer" is -inf, not a text or a finite'),
        (
            GOOD + b'{"prompt": "1+1\\ud800=", "answer": "2"}\n',
            r'train.jsonl:2: field "prompt" holds \ud800, one half of',
        ),
        (b'{"prompt": "1+1=", "answer": "\\uDC00"}\n', r'train.jsonl:1: field "answer" holds \udc00, one half of'),
        (b'{"prompt": "1", "answer": 1, "more": {"x": ["\\ud83d"]}}\n', r'train.jsonl:1: field "more" holds \ud83d'),
        (b'{"prompt": "1", "answer": 1, "\\ud83d": 1}\n', r'train.jsonl:1: field "\ud83d" holds \ud83d'),
        (b'{"prompt": ["1+1?"], "answer": "2"}\n', 'train.jsonl:1: field "prompt" is a list, not a text'),
    ],
)
def test_a_broken_file_names_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read_rows(str(path), DataSettings(train=str(path))))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_both_halves_of_a_character_are_text(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(rb'{"prompt": "\ud83d\ude00 \\ud800", "answer": "2"}' + b"\n")
    (row,) = read_rows(str(path), DataSettings(train=str(path)))
    assert row.fields["prompt"] == "\U0001f600 \\ud800"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("trian.jsonl", "trian.jsonl: no such file; did you mean"),
        ("train.csv", "train.csv: cannot read .csv; data is .jsonl or .parquet"),
        ("train.parquet", "train.parquet: "),
        ("procedural:chian", "did you mean 'chain'?"),
        ("procedural:chain?median", "procedural:chain?median: 'median' is not key=value"),
        ("procedural:chain?meadian=2", "did you mean 'median'?"),
    ],
)
def test_a_wrong_specification_names_the_nearest_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "train.csv", "train.parquet"):
        (tmp_path / name).write_bytes(GOOD)
    with pytest.raises(UserError) as error:
        next(iter(read_rows(spec, DataSettings(train=spec))))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_source_finds_the_broken_row_before_it_serves_the_first(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD * 3 + b"{")
    with pytest.raises(UserError, match=r"train\.jsonl:4"):
        open_source(str(path), DataSettings(train=str(path)), None, 0)


def test_demonstrations_need_their_completion(tmp_path: Path) -> None:
    from fleuve.config.settings import SftModelSettings, SftSettings

    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD)
    settings = SftSettings(run_dir="x", model=SftModelSettings(path="x", save="y"), data=DataSettings(train=str(path)))
    with pytest.raises(UserError, match='no field "completion"'):
        next(open_demonstrations(settings, None))


def test_an_endless_source_has_to_be_told_how_many_problems_to_evaluate_on() -> None:
    with pytest.raises(UserError, match="--limit"):
        load_prompts("procedural:chain", DataSettings(train=""), None, None)


def test_a_chat_template_that_is_not_there() -> None:
    data = DataSettings(train="", template="chat")
    with pytest.raises(UserError, match="no chat template"):
        prompt_text(Row("x:1", {"prompt": "1+1?"}), data, object())


class Characters:
    """A tokenizer: a character is a token."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def write_rows(tmp_path: Path, *rows: bytes) -> DataSettings:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(rows))
    return DataSettings(train=str(path), verifier="code")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"prompt": "p"}', "train.jsonl:2: verifier code: the row has no tests"),
        (b'{"prompt": "p", "cases": []}', 'train.jsonl:2: verifier code: the row\'s "cases" must be a list'),
        (b'{"prompt": "p", "tests": ["assert f()"], "time_limit": -1}', '"time_limit" must be a positive number'),
        (b'{"prompt": "p", "verifier": "math"}', 'train.jsonl:2: no field "answer"'),
        (b'{"prompt": "p", "verifier": "my.own:score"}', 'train.jsonl:2: no field "answer"'),
        (b'{"prompt": "p", "verifier": "code + math", "tests": ["assert f()"]}', 'train.jsonl:2: no field "answer"'),
    ],
)
def test_a_row_has_what_its_verifier_needs(tmp_path: Path, row: bytes, message: str) -> None:
    data = write_rows(tmp_path, b'{"prompt": "p", "tests": ["assert f(1) == 1"]}', row)
    with pytest.raises(UserError) as caught:
        list(read_rows(data.train, data))
    assert message in str(caught.value)


def test_only_who_compares_with_an_answer_needs_one(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path,
        b'{"prompt": "p", "cases": [{"input": "1", "output": "1"}]}',
        b'{"prompt": "p", "tests": ["assert f()"], "verifier": "code + 0.1*`.+`", "answer": null}',
        b'{"prompt": "p", "answer": "", "verifier": "my.own:score"}',
    )
    assert len(list(read_rows(data.train, data))) == 3
    assert [prompt.answer for prompt in load_prompts(data.train, data, Characters(), None)] == [""] * 3


def test_an_instruction_brings_fields_of_the_row_into_the_prompt(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path, b'{"prompt": "{row.n} p", "answer": "1", "tests": ["a", "b"], "n": 2.0, "x": {"k": [null]}}'
    ).model_copy(update={"instruction": r"{prompt}|{row.tests}|{row.n}|{row.x}|{n} \boxed{}"})
    (prompt,) = load_prompts(data.train, data, Characters(), None)
    assert prompt.text == '{row.n} p|a\nb|2|{"k": [null]}|{n} \\boxed{}'
    asks = data.model_copy(update={"instruction": "{prompt} {row.test}"})
    with pytest.raises(UserError, match=r'train.jsonl:1: data.instruction asks for \{row.test\}: no field "test"'):
        load_prompts(data.train, asks, Characters(), None)
