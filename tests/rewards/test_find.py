"""Whether a verifier is there is known without importing it."""

import sys
from pathlib import Path

import pytest

from fleuve.errors import UserError
from fleuve.rewards.find import check_verifier

BOOM = 'raise SystemExit("imported")\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "def f(text, answer, row): return 1.0",
        "async def f(text, answer, row): return 1.0",
        "class f: pass",
        "f = lambda text, answer, row: 1.0",
        "f: object = print",
        "g, (f, *h) = 1, (2, 3)",
        "from math import f",
        "from math import sin as f",
        "from math import *",
        "import f.g",
        "if True:\n    try:\n        pass\n    except E:\n        def f(): pass",
        "with open('x') as f: pass",
        "(f := print)",
        "def __getattr__(name): return print",
        "globals()['f'] = print",
    ],
)
def test_whatever_may_define_the_name_is_let_through_and_never_run(folder: Path, source: str) -> None:
    (folder / "mine.py").write_text(BOOM + source + "\n")
    check_verifier("mine:f")
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def ff(): pass", "data.verifier = mine:f: mine.py has no function 'f'; did you mean 'ff'?"),
        ("class C:\n    def f(self): pass", "mine.py has no function 'f'"),
        ("def g():\n    def f(): pass", "mine.py has no function 'f'"),
        ("x = f", "mine.py has no function 'f'"),
        ("\ndef f(:", "data.verifier = mine:f: mine.py:3: not valid Python: "),
        ("\0", "mine.py"),
    ],
)
def test_a_module_that_cannot_have_the_function_is_one_line(folder: Path, source: str, message: str) -> None:
    (folder / "mine.py").write_text(BOOM + source + "\n")
    with pytest.raises(UserError) as error:
        check_verifier("mine:f")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "mine" not in sys.modules


def test_a_missing_module_names_the_nearest_and_where_it_was_looked_for(folder: Path) -> None:
    (folder / "beside").mkdir()
    (folder / "beside" / "own_scores.py").write_text("def f(): pass\n")
    with pytest.raises(UserError) as error:
        check_verifier("own_score:f", "beside")
    assert str(error.value) == (
        "data.verifier = own_score:f: no module 'own_score' in the current directory and beside, nor installed; "
        "did you mean 'own_scores'?"
    )
    check_verifier("own_scores:f", "beside")
    with pytest.raises(UserError, match="no module 'own_scores' in the current directory, nor installed"):
        check_verifier("own_scores:f")


def test_packages_are_looked_into_without_being_imported(folder: Path) -> None:
    (folder / "pack" / "inner").mkdir(parents=True)
    (folder / "pack" / "__init__.py").write_text(BOOM)
    (folder / "pack" / "inner" / "scores.py").write_text("def f(): pass\n")
    check_verifier("pack.inner.scores:f")
    with pytest.raises(UserError, match=r"pack/inner/scores\.py has no function 'g'"):
        check_verifier("pack.inner.scores:g")
    with pytest.raises(UserError, match=r"no module 'pack\.inner\.score'"):
        check_verifier("pack.inner.score:f")
    assert "pack" not in sys.modules


def test_what_python_brings_or_has_installed_counts() -> None:
    check_verifier("math:sqrt")
    check_verifier("json.decoder:JSONDecoder")
    check_verifier("fleuve.rewards.math:verify_math")
    check_verifier("numpy.linalg:norm")
