"""Which part of an answer is the program."""

import time

import pytest

from fleuve.rewards.code.extraction import extract_program


def test_the_last_fenced_block_of_python_is_the_program() -> None:
    text = "```python\nx = 1\n```\nno:\n```py\nx = 2\n```\nIt prints\n```text\n3\n```\n"
    assert extract_program(text) == "x = 2\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("````python\n```\nx = 1\n````", "```\nx = 1\n"),
        ('```python\ns = "```"\n```', 's = "```"\n'),
        ("```java\nint x;\n```", None),
        ("```python\n```", None),
        ("", None),
        ("x" * 300_000, None),
    ],
)
def test_fences(text: str, program: str | None) -> None:
    assert extract_program(text) == program


@pytest.mark.parametrize(
    "label",
    ["python", "Python", "PYTHON", "py", "py3", "python3", "Python 3", "python3.11", "{python}", "{.python .lines}",
     'python title="a.py"', "python,editable", ""],
)  # fmt: skip
def test_labels_of_python(label: str) -> None:
    assert extract_program(f"```{label}\nx = 1\n```") == "x = 1\n"


@pytest.mark.parametrize("label", ["java", "python-console", "pycon", "pyret", "text", "pypy.log"])
def test_labels_of_something_else(label: str) -> None:
    assert extract_program(f"```{label}\nx = 1\n```") is None


def test_a_block_labelled_as_python_goes_before_those_without_a_label() -> None:
    assert extract_program("```python\nx = 1\n```\nOutput:\n```\n42\n```\n") == "x = 1\n"
    assert extract_program("```\n$ ls\n```\n```python\nx = 1\n```\n```\n42\n```\n```\n") == "x = 1\n"
    assert extract_program("```\nx = 1\n```\nBetter:\n```\nx = 2\n```\n") == "x = 2\n"
    assert extract_program("```python\nx = 1\n```\nEmpty:\n```python\n\n```\n") == "x = 1\n"


def test_a_block_that_the_end_cuts_off_is_the_program_if_no_other_is() -> None:
    assert extract_program("So:\n```python\nx = 1") == "x = 1\n"
    assert extract_program("So:\n```\nx = 1\n") == "x = 1\n\n"
    assert extract_program("```python\nx = 1\n```\n```python\nx = 2") == "x = 1\n"
    assert extract_program("```\nx: 1\n```\n```python\nx = 2\n") == "x = 2\n\n"


def test_a_program_whose_opening_fence_stands_in_the_prompt() -> None:
    assert extract_program("def f(x):\n    return x\n```\nThat is all.") == "def f(x):\n    return x\n"
    assert extract_program("    return x\n```\nAs in\n```\n1\n```\n") == "    return x\n"
    assert extract_program("Import it from the module:\n```\nx = 1\n```") == "x = 1\n"


@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_only_a_line_feed_ends_a_line(mark: str) -> None:
    assert extract_program(f"```python\ns = 'a{mark}b'\n```") == f"s = 'a{mark}b'\n"
    assert extract_program(f"s = 'a{mark}b'\n") == f"s = 'a{mark}b'\n"


def test_windows_line_ends_and_byte_order_marks_are_no_part_of_it() -> None:
    assert extract_program("\ufeffx = 1\r\n") == "x = 1\n"
    assert extract_program("\ufeff```python\r\nx = 1\r\n```\r\n") == "x = 1\n"
    assert extract_program("```python\n\ufeffx = 1\n```") == "x = 1\n"


FUNCTION = "def f(x):\n    if x:\n        return 1\n\n    return 2\n"


@pytest.mark.parametrize("margin", ["", "  ", "    ", "      ", "> ", ">", "> > ", "  > ", ">   "])
@pytest.mark.parametrize("before", ["", "So:\n", "1. First\n\n", "- So:\n"])
def test_indented_and_quoted_fences(margin: str, before: str) -> None:
    block = f"```python\n{FUNCTION}```\n"
    text = before + "".join(f"{margin}{line}".rstrip() + "\n" for line in block.split("\n"))
    assert extract_program(text + "\nDone.") == FUNCTION


@pytest.mark.parametrize("item", ["- ", "* ", "1. ", "12) "])
def test_a_fence_that_begins_an_item(item: str) -> None:
    lines = f"```python\n{FUNCTION}```".split("\n")
    text = item + ("\n" + " " * len(item)).join(lines)
    assert extract_program(f"So:\n\n{text}\n\nDone.") == FUNCTION


def test_fences_in_the_texts_of_a_program_are_its_own() -> None:
    source = 'def f(x):\n    """One more.\n\n    ```python\n    f(1)\n    ```\n    """\n    return x + 1\n'
    assert extract_program(source) == source
    assert extract_program(f"```python\n{source}```\n") == source


def test_what_a_model_thinks_is_no_answer() -> None:
    assert extract_program("<think>\n```python\nbad\n```\nor\n```py\n</think>\nx = 1\n") == "\nx = 1\n"


@pytest.mark.parametrize(
    "text",
    ["> " * 200_000, "```\n" * 100_000, "- " * 200_000, "```python\n" * 50_000, "'''\n" * 100_000, "` " * 200_000],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    start = time.process_time()
    extract_program(text)
    assert time.process_time() - start < 3.0  # 0.3 s; the machine may be busy
