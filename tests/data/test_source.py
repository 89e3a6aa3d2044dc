"""The stream of prompts: every row once a pass, and where it stopped it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleuve.config.settings import DataSettings, SftModelSettings, SftSettings
from fleuve.data.lengths import check_prompts
from fleuve.data.open import PASS_ROWS, load_prompts, open_demonstrations, open_source, read_rows
from fleuve.data.rows import Row
from fleuve.data.source import FilePasses, RowSource
from fleuve.errors import UserError
from fleuve.types import Prompt

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
CHAIN = "procedural:chain"


class Characters:
    """A tokenizer: a character is a token; special tokens are one `^` before the text."""

    chat_template = "there is one"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in ("^" + text if add_special_tokens else text)]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def text_of(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.input_ids))


def source(rows: int = 7, seed: int = 0, shuffle: bool = True) -> RowSource:
    data = [Row(f"train.jsonl:{i + 1}", {"prompt": f"{i}?", "answer": i}) for i in range(rows)]
    return RowSource(
        FilePasses(data, "digest", seed, shuffle),
        lambda id, row: Prompt(id=id, input_ids=[1], text=row.fields["prompt"], answer=str(row.fields["answer"])),
    )


def take(stream: RowSource, count: int) -> list[str]:
    return [stream.next().id for _ in range(count)]


def test_each_pass_holds_every_row_once_in_an_order_of_its_own() -> None:
    stream = source()
    first, second = take(stream, 7), take(stream, 7)
    assert sorted(first) == [f"e0/{i}" for i in range(7)]
    assert sorted(second) == [f"e1/{i}" for i in range(7)]
    assert [i.split("/")[1] for i in first] != [i.split("/")[1] for i in second]
    assert take(source(), 7) == first
    assert take(source(seed=1), 7) != first
    assert take(source(shuffle=False), 7) == [f"e0/{i}" for i in range(7)]


def test_it_never_ends() -> None:
    assert len(set(take(source(rows=1), 100))) == 100


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["next", "give back", "restart"]), max_size=60), st.integers(0, 3))
def test_whatever_happens_each_prompt_is_served_once_and_once_more_for_each_time_it_came_back(
    actions: list[str], seed: int
) -> None:
    stream = source(seed=seed)
    in_flight: list[Prompt] = []
    trained: list[str] = []
    for action in actions:
        if action == "next":
            in_flight.append(stream.next())
        elif action == "give back" and in_flight:
            stream.give_back(in_flight.pop(0))
        elif action == "restart":
            # The checkpoint holds the cursor and what was in flight; all else is lost.
            state = json.loads(json.dumps(stream.state()))
            ids = [p.id for p in in_flight]
            stream = source(seed=seed)
            stream.restore(state)
            for id in ids:
                stream.give_back(stream.prompt(id))
            in_flight.clear()
        if len(in_flight) > 3:
            trained.append(in_flight.pop(0).id)
    while len(trained) < 21:
        trained.append((in_flight.pop(0) if in_flight else stream.next()).id)
    rest = [p.id for p in in_flight] + [stream.next().id for _ in range(len(actions))]
    seen = trained + rest
    assert len(set(seen)) == len(seen)
    assert {f"e{e}/{i}" for e in range(3) for i in range(7)} <= set(seen)


def test_what_was_given_back_comes_before_new_prompts() -> None:
    stream = source(shuffle=False)
    first, second, _ = (stream.next() for _ in range(3))
    stream.give_back(second)
    stream.give_back(first)
    assert take(stream, 3) == ["e0/1", "e0/0", "e0/3"]


def test_giving_back_twice_is_a_fault() -> None:
    stream = source()
    prompt = stream.next()
    stream.give_back(prompt)
    with pytest.raises(ValueError, match="twice"):
        stream.give_back(prompt)


def test_a_cursor_of_other_data_is_refused() -> None:
    state = source(rows=7).state()
    for other in (source(rows=8), source(seed=1), source(shuffle=False)):
        with pytest.raises(UserError, match="belongs to other data"):
            other.restore(state)


@pytest.mark.parametrize("id", ["e0/7", "e0", "0/1", "eval/0", "e-1/0", ""])
def test_an_unknown_prompt_is_a_key_error(id: str) -> None:
    with pytest.raises(KeyError):
        source().prompt(id)


def test_a_procedural_source_never_repeats_itself_and_resumes_in_any_pass() -> None:
    data = DataSettings(train=CHAIN)
    stream = open_source(CHAIN, data, Characters(), seed=3)
    ahead = [stream.next() for _ in range(PASS_ROWS + 5)]
    state = json.loads(json.dumps(stream.state()))
    following = [stream.next() for _ in range(5)]
    again = open_source(CHAIN, data, Characters(), seed=3)
    again.restore(state)
    assert [again.next() for _ in range(5)] == following
    assert again.prompt(ahead[2].id) == ahead[2]
    assert ahead[0].text != ahead[PASS_ROWS].text
    assert open_source(CHAIN, data, Characters(), seed=4).next().text != ahead[0].text


def test_held_out_problems_are_not_among_those_trained_on() -> None:
    data = DataSettings(train=CHAIN)
    held_out = load_prompts(CHAIN, data, Characters(), 200)
    assert len({p.text for p in held_out}) == 200
    assert load_prompts(CHAIN, data, Characters(), 200) == held_out
    stream = open_source(CHAIN, data, Characters(), seed=0)
    trained = {stream.next().text for _ in range(2000)}
    assert not trained & {p.text for p in held_out}


def test_an_evaluation_on_a_file_takes_the_same_rows_each_time(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(50)))
    data = DataSettings(train="", eval=str(path))
    some = load_prompts(str(path), data, Characters(), 10)
    assert some == load_prompts(str(path), data, Characters(), 10)
    assert len({p.text for p in some}) == 10
    assert [p.answer for p in load_prompts(str(path), data, Characters(), None)] == [str(i) for i in range(50)]


def test_templates(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "What is {x} + 1?", "answer": 14.0, "level": 3}\n')
    plain = DataSettings(train=str(path), instruction="{prompt} Put it in \\boxed{}.")
    prompt = open_source(str(path), plain, Characters(), 0).next()
    assert text_of(prompt) == "^What is {x} + 1? Put it in \\boxed{}."
    assert prompt.answer == "14"
    assert prompt.row["level"] == 3
    chat = plain.model_copy(update={"template": "chat", "system_prompt": "Think."})
    prompt = open_source(str(path), chat, Characters(), 0).next()
    assert text_of(prompt) == "<system>Think.<user>What is {x} + 1? Put it in \\boxed{}.<assistant>"
    assert prompt.text == text_of(prompt)


def test_demonstrations_are_prompt_and_completion_without_end() -> None:
    sft = SftSettings(run_dir="x", model=SftModelSettings(path="x", save="y"), data=DataSettings(train=CHAIN))
    stream = open_demonstrations(sft, Characters())
    for _ in range(PASS_ROWS + 1):
        prompt, completion = next(stream)
    assert chr(prompt[0]) == "^"
    assert chr(prompt[-1]) == "?"
    assert chr(completion[0]) != "^"
    assert "#" in "".join(map(chr, completion))


def test_a_prompt_longer_than_the_context_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "12345678", "answer": 1}\n{"prompt": "123456789", "answer": 1}\n')
    data = DataSettings(train=str(path))
    assert check_prompts(read_rows(str(path), data), data, Characters(), context=30, max_new_tokens=20) == 10
    with pytest.raises(UserError) as error:
        check_prompts(read_rows(str(path), data), data, Characters(), context=20, max_new_tokens=12)
    assert f"{path}:2: a prompt of 10 tokens" in str(error.value)
    assert "rollout.max_new_tokens = 10 would fit" in str(error.value)


def test_gsm8k_as_it_is_distributed() -> None:
    path = SHARED / "gsm8k_train.jsonl"
    if not path.exists():
        pytest.skip("gsm8k_train.jsonl is not on this machine (it stays outside the repository)")
    from fleuve.rewards.math import verify_math

    data = DataSettings(train=str(path), prompt_field="question")
    stream = open_source(str(path), data, Characters(), seed=0)
    prompts = [stream.next() for _ in range(7473 + 1)]
    assert len({p.id for p in prompts[:7473]}) == 7473
    assert prompts[7473].id.startswith("e1/")
    first = stream.prompt("e0/0")
    assert first.text.startswith("Natalia sold clips")
    assert verify_math("so \\boxed{72}", first.answer) == 1.0
    assert verify_math("so \\boxed{48}", first.answer) == 0.0
