"""Whose a name in a row's tests is, and what happens to a row that does not show it."""

from __future__ import annotations

from typing import Any

import pytest

from fleuve.config.settings import DataSettings
from fleuve.data.rows import Row
from fleuve.data.verified import check_verified
from fleuve.errors import UserError
from fleuve.rewards.code.rows import Functions
from fleuve.rewards.code.rows import tests_of as read_tests
from fleuve.rewards.code.verify import CodeVerifier

# A function under test with a name of Python's

BUILTINS = ["sum", "len", "isinstance", "getattr", "NameError", "cast"]


@pytest.mark.parametrize("name", BUILTINS)
def test_fn_name_is_the_programs_whatever_python_has_by_that_name(name: str, verifier: CodeVerifier) -> None:
    row = {"fn_name": name, "cases": [{"input": "[1, 2]\n3", "output": '[true, 3.5, {"a": [6]}]'}]}
    right = "return [True, 3.5, {'a': (x[0] + x[1] + y,)}]"
    assert verifier(f"def {name}(x, y): {right}", row) == 1.0
    assert verifier(f"class Solution:\n    def {name}(self, x, y): {right}", row) == 1.0
    assert verifier(f"def {name}(x, y): return 0", row) == 0.0


@pytest.mark.parametrize(
    ("name", "given", "output"),
    [("len", "[1, 2]", "2"), ("sum", "[1, 2]", "3"), ("abs", "-1", "1"), ("sorted", "[2, 1]", "[1, 2]"),
     ("gcd", "4\n6", "2"), ("cast", "1\n2", "2"), ("reduce", "1\n2", "2"), ("__build_class__", "1", "1")],
)  # fmt: skip
def test_python_does_not_answer_for_what_the_program_does_not_define(
    name: str, given: str, output: str, verifier: CodeVerifier
) -> None:
    assert verifier("x = 1", {"fn_name": name, "cases": [{"input": given, "output": output}]}) == 0.0


def test_the_same_in_assertions_and_completions(verifier: CodeVerifier) -> None:
    row: dict[str, Any] = {"tests": ["assert sum([1, 2]) == 3"]}
    assert verifier("x = 1", row) == 0.0
    assert verifier("def sum(x): return 3", row) == 1.0
    row |= {"entry_point": "sum"}
    assert verifier("x = 1", row) == 0.0
    row = {"entry_point": "sorted", "test": "def check(f):\n    assert sorted(f([1, 2])) == [1, 2] and len([f]) == 1"}
    assert verifier("x = 1", row) == 0.0
    assert verifier("def sorted(x): return x[::-1]", row) == 1.0
    assert verifier("def sorted(x): return [1]", row) == 0.0


# Comparison helpers that the tests lack

FORGED = "def {0}(*a, **k): return {1}\ndef f(x): return 0\n"


@pytest.mark.parametrize(
    ("tests", "helper", "answer"),
    [
        (["assert same(f(2), 1.5)"], "same", "True"),
        (["assert not differ(f(2), 1.5)"], "differ", "False"),
        (["assert same(f(2), 1.5) == True"], "same", "True"),
        (["assert same(f(2), 1.5) is True and f(0) == 0"], "same", "True"),
        (["assert distance(f(2), 1.5) < 1e-6"], "distance", "0"),
        (["assert f(2) == approx(1.5)"], "approx", "0"),
        (["assert approx(1.5) == f(2)"], "approx", "0"),
        (["assert norm(f(2)) == norm([1])"], "norm", "0"),
        (["assert f(2) in near(1.5)"], "near", "[0]"),
        (["r = f(2)\nassert same(r, 1.5)"], "same", "True"),
        (["r = [f(2)]\ns = r\nok = same(s, 1.5)\nassert ok"], "same", "True"),
        (["r = []\nr.append(f(2))\nassert same(r, 1.5)"], "same", "True"),
        (["r = {}\nr['a'] = f(2)\nassert same(r, 1.5)"], "same", "True"),
        (["for r, s in [(f(2), 1)]:\n    assert same(r, s)"], "same", "True"),
        (["def t(x):\n    assert same(x, 1.5)\nt(f(2))"], "same", "True"),
        (["t = lambda x: same(x, 1.5)\nassert t(f(2))"], "same", "True"),
        (["if not same(f(2), 1.5):\n    raise ValueError"], "same", "True"),
        (["assert all(same(f(x), 1.5) for x in [1, 2])"], "same", "True"),
        (["l = [3, 1]\nf(l)\nassert same(l, [1, 3])"], "same", "True"),
        (["try:\n    raise ValueError(f(1))\nexcept ValueError as e:\n    assert same(e.args, (1,))"], "same", "True"),
        (["assert f(1) == 0", "assert same(f(2), 1.5)"], "same", "True"),
        (["assert Close(f(2), 1.5)"], "Close", "True"),
        (["assert f(2) == Approx(1.5)"], "Approx", "0"),
        (["e = Approx(1.5)\nassert f(2) == e"], "Approx", "0"),
        (["c = Checker()\nc.add(f(2))\nassert c.near(1.5)"], "Checker", "0"),
        (["r = f(2)\ne = Approx(1.5)\nassert r == e"], "Approx", "0"),
        (["def t():\n    assert f(2) == Approx(1.5)\nt()"], "Approx", "0"),
        (["def t():\n    return f(2) == Approx(1.5)\nassert t()"], "Approx", "0"),
        (["assert abs(f(2) - 1.5) < EPS"], "EPS", "0"),
        (["assert Checker.close(f(2), 1.5)"], "Checker", "0"),
        (["assert Close(Result(2), 1.5)"], "Close", "True"),
    ],
)  # fmt: skip
def test_a_helper_that_nothing_defines_makes_the_row_unusable(
    tests: list[str], helper: str, answer: str, verifier: CodeVerifier
) -> None:
    with pytest.raises(ValueError, match=f'they use .*{helper}.* "entry_point": '):
        verifier(FORGED.format(helper, answer), {"tests": tests})
    with pytest.raises(ValueError, match=f"nothing defines '({helper}|Result)'"):
        read_tests({"tests": tests, "entry_point": "f"})


@pytest.mark.parametrize("named", [{"entry_point": "f"}, {"fn_name": "f"}, {"entry_point": ["f"]}, {}])
def test_isclose_is_maths_where_something_else_is_under_test(named: dict[str, Any], verifier: CodeVerifier) -> None:
    row = {"tests": ["assert isclose(f(2), 1.5)", "assert not isnan(f(2)) and f(2) < inf"]} | named
    assert (
        verifier("def isclose(*a): return True\ndef isnan(*a): return False\ninf = 9\ndef f(x): return 0", row) == 0.0
    )
    assert verifier("def f(x): return 1.5", row) == 1.0


def test_a_function_called_isclose_can_be_under_test(verifier: CodeVerifier) -> None:
    row = {"tests": ["assert isclose(1, 2) == True"]}
    assert verifier("def isclose(a, b): return abs(a - b) < 2", row) == 1.0
    assert verifier("x = 1", row) == 0.0


def test_a_completion_has_one_name_and_the_rest_must_be_there() -> None:
    test = "def check(candidate):\n    assert close(candidate(2), 1.5)\n"
    row: dict[str, Any] = {"entry_point": "f", "test": test}
    with pytest.raises(ValueError, match="nothing defines 'close'"):
        read_tests(row)
    with pytest.raises(ValueError, match="nothing defines 'close'"):
        read_tests(row | {"prompt": "Write f."})
    assert isinstance(read_tests(row | {"prompt": "def close(a, b): return a == b\ndef f(x):\n"}), Functions)
    assert isinstance(read_tests(row | {"entry_point": ["f", "close"]}), Functions)


def test_the_preflight_names_the_place_of_such_a_row() -> None:
    row = Row("problems.jsonl:7", {"prompt": "?", "tests": ["assert same(f(2), 1.5)"]})
    with pytest.raises(UserError, match=r"problems\.jsonl:7: .*they use 'f' together with 'same'"):
        check_verified(row, DataSettings(train="x", verifier="code"))


def test_the_row_can_say_that_several_names_are_the_programs(verifier: CodeVerifier) -> None:
    row = {"tests": ["assert decode(encode('aab')) == 'aab'"], "entry_point": ["encode", "decode"]}
    assert verifier("def encode(x): return list(x)\ndef decode(x): return ''.join(x)", row) == 1.0
    assert verifier("def encode(x): return list(x)\ndef decode(x): return x", row) == 0.0
    with pytest.raises(ValueError, match="no name: 3"):
        read_tests(row | {"entry_point": ["f", 3]})


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (["assert add(1, 2) == 3", "assert mul(1, 2) == 2 and add(0, 0) == 0"], "add"),
        (["x = 2\nassert f(x) == 3\ny = 3\nassert g(y) == 4"], "f"),
        (["assert f(Node(1)) == 1"], "Node"),
        (["n = Node(1)\nn.left = Node(2)\nassert f(n) == 3 and n.left.v == 2"], "Node"),
        (["r = f(Node(1))\nassert r == 1"], "Node"),
        (["def test():\n    n = Node(1)\n    assert f(n) == 3\ntest()"], "Node"),
        (["s = Stack()\ns.push(1)\nassert s.pop() == 1 and not s.full"], "Stack"),
        (["assert sys.getsizeof(f(1)) == sys.getsizeof(1)"], "f"),
        (["from math import *\nassert isqrt(f(4)) == 2 and f(pi) > e"], "f"),
    ],
)  # fmt: skip
def test_rows_that_show_whose_their_names_are(tests: list[str], program: str) -> None:
    functions = read_tests({"tests": tests})
    assert isinstance(functions, Functions)
    assert program in functions.names.remote
    assert not {"sys", "isqrt", "pi", "e"} & functions.names.remote.keys()


def test_a_module_of_pythons_is_not_the_programs_but_a_function_of_its_name_is(verifier: CodeVerifier) -> None:
    assert verifier("class sys: getsizeof = lambda x: 0\ndef f(x): return 1", {
        "tests": ["assert f(9) == sys.getsizeof(9)"]}) == 0.0  # fmt: skip
    assert verifier("def copy(x): return list(x)", {"tests": ["assert copy([1]) == [1]"]}) == 1.0


def test_tests_that_ask_nothing_of_a_program_are_the_rows_error() -> None:
    for tests in (["assert True"], ["def f(x): return x\nassert f(1) == 1"]):
        with pytest.raises(ValueError, match="nothing that the program defines"):
            read_tests({"tests": tests})


# What cannot be passed to a program, and whose fault it is

GIVEN = {"tests": ["assert f([Pair(5, 24)]) == 3", "assert f([Pair(1, 2), Pair(3, 4)]) == 3"]}


@pytest.mark.parametrize(
    "pair",
    ["Exception", "object", "map", "list", "type", "None", "len"],
)
def test_what_a_program_puts_in_a_classs_place_is_its_own_fault(pair: str, verifier: CodeVerifier) -> None:
    assert verifier(f"Pair = {pair}\ndef f(a): return 0", GIVEN) == 0.0


@pytest.mark.parametrize("given", ["Exception", "object", "iter([1])", "{1: 2}.items()", "f", "[]"])
def test_what_a_programs_function_returns_is_its_own_fault(given: str, verifier: CodeVerifier) -> None:
    row = {"tests": ["assert f(f(1)(2)) == 3", "assert f(f(1).items()) == 3", "assert f([*f(2)][0].pop) == 1"]}
    assert verifier(f"def f(x): return {given}", row) == 0.0


def test_an_error_on_the_way_to_the_program_is_no_answer_of_it(verifier: CodeVerifier) -> None:
    row = {"tests": ["try:\n    f(Pair(1, 2))\n    assert False\nexcept ValueError: pass"]}
    assert verifier("Pair = Exception\ndef f(x): return 0", row) == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "assert f(lambda: 1) == 1",
        "class A: pass\nassert f([A()]) == 1",
        "import datetime\nassert f(datetime.date(2020, 1, 1)) == 1",
        "assert f(1) == 0\nassert f(iter([1])) == 7",
        "x = f(1) - 2\nassert f(map(int, '1')) == 1",
        "for i in range(3):\n    assert f(i) != 7\nassert f(x=print) == 1",
        "def t(g):\n    if g(1) == 5:\n        return\n    assert g(1, object()) == 1\nt(f)",
        "assert f('x' * 9_000_000) == 1",
        "x = []\nfor i in range(99): x = [x]\nassert f(x) == 1",
    ],
)
def test_what_the_tests_themselves_cannot_pass_is_the_rows_fault(test: str, verifier: CodeVerifier) -> None:
    row = {"tests": [test, "assert f(1) == 0"], "entry_point": "f"}
    with pytest.raises(ValueError, match=r"tests cannot be run: .*pass|nested|too large"):
        verifier("def f(*a, **k): return 0", row)


def test_tests_that_never_end_without_an_answer_do_not_hold_the_verdict_up(verifier: CodeVerifier) -> None:
    row = {"tests": ["while not f(1) == 3: pass\nassert f(Pair(1)) == 1"]}
    assert verifier("Pair = Exception\ndef f(x): return 3", row) == 0.0


# What a call leaves in its arguments


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): x.append(1)", "l = []\nf(x=l)\nassert l == [1]"),
        ("def f(x): x[0].append(1)", "a = [[], []]\nb = a[0]\nf(a)\nassert b == [1] and a[0] is b"),
        ("def f(x): x[0].append(1)", "a = []\nf([a, a])\nassert a == [1]"),
        ("def f(x): x['a'].add(2); x['b'] = x['a']", "s = {1}\nd = {'a': s}\nf(d)\nassert s == {1, 2} and d['b'] is s"),
        ("def f(x, y): x.append(len(y)); y.append(3)", "a = []\nf(a, y=a)\nassert a == [0, 3]"),
        ("def f(x): x[0][1][0].append(1)", "a = []\nf([(0, [a])])\nassert a == [1]"),
        ("def f(x):\n  x.reverse()\n  return x", "a = [1, 2]\nb = f(a)\nassert b is a and a == [2, 1]"),
        ("def f(x): return [x, x]", "a = [1]\nb = f(a)\nb[0].append(2)\nassert a == [1, 2] and b[1] is a"),
        ("def f():\n  a = []\n  return [a, a]", "a = f()\na[0].append(1)\nassert a == [[1], [1]] and a[0] is a[1]"),
        ("def f(x): x.append(x)", "a = []\nf(a)\nassert a[0] is a"),
        ("def f(x): return len(x) if x[0] is x else 0", "a = []\na.append(a)\nassert f(a) == 1"),
        ("def f(x):\n  x.append(1)\n  raise KeyError", "a = []\ntry: f(a)\nexcept KeyError: pass\nassert a == [1]"),
        ("def f(x): x[:] = [True]", "a = [1]\nf(a)\nassert a[0] is True"),
        ("def f(x): x += b'a'", "a = bytearray(b'b')\nf(a)\nassert a == b'ba'"),
        ("def f(d, k): return d[k]", "d = {1: [2], 3: [4]}\nfor k in d: assert f(d, k) == d[k]"),
        ("def f(x): x.clear()", "from collections import Counter\nc = Counter('aab')\nf(c)\nassert not c"),
        ("def f(x): x['a'] += 1", "from collections import Counter\nc = Counter('aa')\nf(c)\nassert c == {'a': 3}"),
        ("class S:\n  def put(self, *, to): to.append(2)", "a = []\nS().put(to=a)\nassert a == [2]"),
    ],
)  # fmt: skip
def test_what_a_call_does_to_its_arguments_is_seen(program: str, test: str, verifier: CodeVerifier) -> None:
    assert verifier(program, {"tests": [test]}) == 1.0
    assert verifier("def f(*a, **k): return None\nclass S:\n  def put(self, to): pass", {"tests": [test]}) == 0.0


def test_a_future_import_in_a_program_that_completes_a_prompt(verifier: CodeVerifier) -> None:
    row = {
        "prompt": "import math\ndef f(x):\n    'Half.'\n",
        "entry_point": "f",
        "test": "def check(f):\n    assert f(3) == 1.5",
    }
    assert verifier("from __future__ import annotations\ndef f(x: Nothing): return math.fabs(x) / 2", row) == 1.0
