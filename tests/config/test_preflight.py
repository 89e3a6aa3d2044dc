"""What `fleuve check` finds without starting anything, each in one line."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from checked import Make, problems
from hypothesis import assume, given
from hypothesis import strategies as st

from fleuve.config.data_facts import DataFacts
from fleuve.config.models import FETCHED, inspect_model
from fleuve.config.preflight import length_problems, preflight
from fleuve.config.settings import Settings
from fleuve.engine.scheduler import Limits, Scheduler
from fleuve.observe.rundir import create_run_directory


def test_a_sound_run_is_summed_up(make: Make) -> None:
    lines = "\n".join(preflight(make(control={"max_staleness": 2, "batch_size": 4}, rollout={"group_size": 8})))
    assert "context 100" in lines
    assert "3 rows, longest prompt 20 tokens" in lines
    assert "4 groups × 8 answers = 32 answers" in lines
    assert all(line.startswith("ok: ") for line in lines.splitlines())
    assert "12 slots = (2 + 1) × 4: at most 2 versions stale" in lines


def test_it_starts_nothing_and_writes_nothing(make: Make, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    preflight(make())
    assert sorted(tmp_path.rglob("*")) == before


def test_broadcasts_need_files_without_names(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make(weights={"transport": "broadcast"})
    preflight(settings)
    monkeypatch.delattr(os, "memfd_create")
    assert problems(settings) == [
        'weights.transport = "broadcast" needs files without names, which this system has not (Linux has)'
    ]


def test_a_missing_model_names_the_nearest(make: Make, model: Path) -> None:
    assert problems(make(model={"path": str(model.with_name("tinny"))})) == [
        "model.path = tinny: no such directory; did you mean tiny?"
    ]


@pytest.mark.parametrize(
    "path",
    ["models/other", "runs/mine", "./here/it", "../there/it", "/nowhere/at/all", "~/it", "a/b/c", "mine", "there/x"],
)
def test_what_looks_like_a_directory_and_is_missing_is_no_hub_name(
    make: Make, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (line,) = problems(make(model={"path": path}))
    assert line.startswith(f"model.path = {path}: no such directory")


def test_a_model_that_can_be_fetched_says_how(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = "model.path = models/smollm2: no such directory; make it with: fleuve fetch smollm2"
    assert problems(make(model={"path": "models/smollm2"})) == [expected]


def test_it_is_where_fetching_puts_it() -> None:
    from fleuve.modeling.smollm2 import DEFAULT

    assert FETCHED == {DEFAULT: "smollm2"}


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        ("config.json", "model.path = tiny: no config.json in it, so it is not a model directory"),
        ("model.safetensors", "model.path = tiny: no weights in it (looked for *.safetensors)"),
        (
            "tokenizer.json",
            "model.path = tiny: no tokenizer in it "
            "(looked for tokenizer.json, tokenizer.model, vocab.json, vocab.txt, spiece.model)",
        ),
    ],
)
def test_a_model_directory_must_be_whole(make: Make, model: Path, missing: str, what: str) -> None:
    (model / missing).unlink()
    assert problems(make()) == [what]


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-00002.safetensors"])
@pytest.mark.parametrize(
    ("kept", "what"),
    [(0, "corrupt"), (5, "corrupt"), (20, "truncated"), (-400, "truncated"), (-1, "truncated"), (None, "corrupt")],
)
def test_weights_that_are_not_whole_are_one_line_that_names_the_file(
    make: Make, model: Path, name: str, kept: int | None, what: str
) -> None:
    preflight(make())
    whole = (model / "model.safetensors").read_bytes()
    (model / name).write_bytes(whole[:kept] if kept is not None else whole + b"\0")
    (line,) = problems(make())
    assert line.startswith(f"tiny/{name}: {what}: ")


def test_a_git_lfs_pointer_is_no_weights(make: Make, model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n")
    (line,) = problems(make())
    assert line.startswith("tiny/model.safetensors: corrupt: it does not begin with a safetensors header")


def test_every_shard_that_the_index_names_must_be_there(make: Make, model: Path) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (model / "model.safetensors").rename(model / names[0])
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": names[0], "bias": names[1]}}))
    assert problems(make()) == [
        "tiny/model.safetensors.index.json: 1 of its 2 files are missing, the first is " + names[1]
    ]
    index.write_text("{}")
    (line,) = problems(make())
    assert line.startswith("tiny/model.safetensors.index.json: cannot be read as an index of weights")


def test_a_run_directory_in_place_of_a_model_names_the_model_in_it(make: Make, model: Path) -> None:
    inner = model.parent / "old" / "checkpoints" / "step-000100" / "model"
    inner.parent.mkdir(parents=True)
    model.rename(inner)
    (line,) = problems(make(model={"path": str(model.parent / "old")}))
    assert line.endswith("did you mean old/checkpoints/step-000100/model?")


def test_a_hub_name_passes_unchecked_and_says_so(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    lines = preflight(make(model={"path": "some-org/some-model-1.5B"}))
    assert "a hub name, fetched when the run starts" in lines[0]


def test_a_hub_name_in_the_cache_is_checked_there(
    make: Make, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = tmp_path / "cache" / "models--some-org--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    model.rename(repository / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert inspect_model("some-org/some-model").context == 100


def test_an_unknown_builtin_model_lists_the_known(make: Make) -> None:
    (line,) = problems(make(model={"path": "builtin:nothing"}))
    assert line.startswith("model.path = builtin:nothing: no such built-in model; there are: ")


def test_the_context_bounds_prompt_and_answer_together(make: Make) -> None:
    (line,) = problems(make(rollout={"max_new_tokens": 90}))
    assert line == (
        "the longest sequence has 110 tokens (a prompt of 20 at rows.jsonl:2, and rollout.max_new_tokens = 90); "
        "the model's context is 100: rollout.max_new_tokens can be 80 at most"
    )
    assert problems(make(rollout={"max_new_tokens": 100})) == [
        "rollout.max_new_tokens = 100 leaves no room for a prompt: the model's context is 100 tokens"
    ]


def test_a_prompt_longer_than_the_context_is_named(make: Make, rows: Path) -> None:
    rows.write_text(json.dumps({"prompt": "1" * 200, "answer": "1"}) + "\n")
    assert problems(make()) == ["the prompt at rows.jsonl:1 has 200 tokens; the model's context is 100"]


def test_the_longest_row_is_found_wherever_it_is_and_how_many_were_looked_at_is_said(
    make: Make, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = ({"prompt": "1" * n, "answer": "1"} for n in (5, 60))
    rows.write_text((json.dumps(short) + "\n") * 25_000 + json.dumps(long) + "\n")
    monkeypatch.setattr("fleuve.config.data_facts.SECONDS", 60.0)
    (line,) = problems(make())
    assert "a prompt of 60 at rows.jsonl:25001" in line
    assert "25,001 rows, longest prompt 60 tokens (all checked)" in preflight(make(rollout={"max_new_tokens": 40}))[1]
    monkeypatch.setattr("fleuve.config.data_facts.SECONDS", 0.0)
    assert "only the first 20,000 rows checked, longest prompt 5 tokens of these" in preflight(make())[1]


def test_a_big_file_takes_little_longer_than_its_time(make: Make, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows.write_text('{"prompt": "1+1", "answer": 2}\n' * 1_000_000)
    monkeypatch.setattr("fleuve.config.data_facts.SECONDS", 0.1)
    began = time.monotonic()
    lines = preflight(make())
    assert "only the first " in lines[1]
    assert time.monotonic() - began < 3.0  # 0.2 s on a quiet machine


def test_the_instruction_counts_towards_the_prompt(make: Make) -> None:
    lines = preflight(make(data={"instruction": "Say: {prompt}"}))
    assert "longest prompt 25 tokens" in lines[1]


def test_the_chat_template_counts_too(make: Make, model: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    config = {"chat_template": template, "bos_token": {"content": "^"}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert "longest prompt 28 tokens" in preflight(make(data={"template": "chat"}))[1]
    assert "longest prompt 41 tokens" in preflight(make(data={"template": "chat", "system_prompt": "Think"}))[1]


def test_a_chat_template_that_is_missing_or_broken_is_found(make: Make, model: Path) -> None:
    (line,) = problems(make(data={"template": "chat"}))
    assert "has no chat template" in line
    (model / "chat_template.jinja").write_text("{% if %}")
    (line,) = problems(make(data={"template": "chat"}))
    assert line.startswith("the model's chat template: ")


def test_cache_and_token_budget_hold_the_longest_sequence(make: Make) -> None:
    lines = problems(make(rollout={"kv_cache_tokens": 60}, trainer={"token_budget": 69}))
    assert [line.split(" is ")[0] for line in lines] == ["rollout.kv_cache_tokens = 60", "trainer.token_budget = 69"]
    assert [line.split("; ")[-1] for line in lines] == ["give it 100 or more", "give it 70 or more"]
    preflight(make(rollout={"kv_cache_tokens": 100}, trainer={"token_budget": 70}))


@given(context=st.integers(2, 1000), prompt=st.integers(1, 999), new=st.integers(1, 999), cache=st.integers(1, 1100))
def test_a_cache_that_is_accepted_or_recommended_is_one_that_the_engine_takes(
    context: int, prompt: int, new: int, cache: int
) -> None:
    assume(prompt + new <= context)

    def lines(cache: int) -> list[str]:
        settings = Settings.model_validate(
            {
                "run_dir": "r",
                "model": {"path": "m"},
                "data": {"train": "d"},
                "rollout": {"max_new_tokens": new, "kv_cache_tokens": cache},
            }
        )
        return length_problems(settings, DataFacts(rows=1, complete=True, longest=prompt, where="d:1"), context)

    def refused(cache: int) -> bool:
        limits = Limits(max_running=1, kv_cache_tokens=cache, prefill_tokens=1, context=context)
        return Scheduler(limits).refusal(prompt, new) is not None

    found = lines(cache)
    assert bool(found) == refused(cache)
    for line in found:
        match = re.search(r"give it (\d+) or more", line)
        assert match
        assert not refused(int(match[1]))
        assert refused(int(match[1]) - 1)


def test_missing_data_names_the_nearest(make: Make, rows: Path) -> None:
    (line,) = problems(make(data={"train": str(rows.with_name("row.jsonl"))}))
    assert "row.jsonl" in line
    assert "did you mean rows.jsonl?" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["rows.jsonl: the data set is empty"]),
        ('{"prompt": "1", "answer": "1"}\n{"prompt": \n', ["rows.jsonl:2: not valid JSON"]),
        ('{"prompt": "1", "answr": "1"}\n', ['rows.jsonl:1: no field "answer"', 'did you mean "answr"?']),
    ],
)
def test_broken_data_gives_file_and_line(make: Make, rows: Path, text: str, words: list[str]) -> None:
    rows.write_text(text)
    (line,) = problems(make())
    for word in words:
        assert word in line


def test_procedural_data_is_checked_too(make: Make) -> None:
    line = preflight(make(data={"train": "procedural:chain?max_steps=2"}))[1]
    assert "endless, the first 500 rows checked, longest prompt" in line
    (line,) = problems(make(data={"train": "procedural:chian"}))
    assert "chain" in line


def test_an_unknown_verifier_and_an_evaluation_without_data_are_found_together(make: Make) -> None:
    lines = problems(make(data={"verifier": "maths"}, evaluate={"every": 10}))
    assert len(lines) == 2
    assert "evaluate.every = 10 needs a data set to evaluate on, in data.eval" in lines
    assert any("'maths'" in line and "'math'" in line for line in lines)


def test_a_run_directory_that_cannot_be_one_is_found(make: Make, rows: Path) -> None:
    (line,) = problems(make(run_dir=str(rows.parent / "rows.jsonl")))
    assert line == "run_dir = rows.jsonl: is a file, not a directory"


def test_a_run_directory_that_cannot_be_made_is_found(make: Make, tmp_path: Path) -> None:
    (line,) = problems(make(run_dir=str(tmp_path / ("x" * 300))))
    assert line.endswith("cannot be looked at: File name too long")
    if Path("/proc/self").exists():
        (line,) = problems(make(run_dir="/proc/run"))
        assert line.startswith("run_dir = run: no ")  # (`problems` takes the parent's path away)


def test_a_run_directory_that_another_run_holds_is_found_and_left_alone(make: Make, tmp_path: Path) -> None:
    run = create_run_directory(tmp_path / "run", "")
    before = sorted(tmp_path.rglob("*"))
    assert problems(make()) == [f"a run is going on in run (process {os.getpid()}); choose another run_dir"]
    assert sorted(tmp_path.rglob("*")) == before
    run.release()
    preflight(make())


def test_an_instruction_without_a_place_for_the_problem_is_an_error(make: Make) -> None:
    assert problems(make(data={"instruction": "Solve it."})) == [
        "data.instruction holds no {prompt}, so no prompt would hold its problem; write {prompt} where the problem goes"
    ]
    (line,) = problems(make(data={"instruction": r"Solve \boxed{1}: {question}"}))
    assert line.endswith("; write {prompt} for {question}")


def test_sampling_from_a_part_of_the_distribution_is_noted(make: Make) -> None:
    lines = preflight(make(rollout={"top_p": 0.95, "top_k": 20}))
    notes = [line for line in lines if not line.startswith("ok: ")]
    assert [note.split(":")[:2] for note in notes] == [
        ["note", " rollout.top_p = 0.95"],
        ["note", " rollout.top_k = 20"],
    ]
    assert [note.split("; ")[-1] for note in notes] == ["prefer 1.0", "prefer 0"]


@pytest.mark.parametrize("key", ["rollout", "trainer"])
def test_a_gpu_that_is_not_there_is_missed_before_anything_starts(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("fleuve.config.accelerator.TRACES", (str(tmp_path / "driver"),))
    settings = make(**{key: {"device": "cuda"}})
    (line,) = problems(settings)
    assert line.startswith(f'{key}.device = "cuda": this machine has no GPU')
    (tmp_path / "driver").touch()
    preflight(settings)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (line,) = problems(settings)
    assert "CUDA_VISIBLE_DEVICES= hides every GPU" in line
