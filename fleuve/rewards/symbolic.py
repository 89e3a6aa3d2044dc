r"""Symbolic equality of two single expressions, by math-verify and sympy, bounded.

Hostile expressions cost their size, not their value: whatever the parser would evaluate on the spot is refused by its
text, and the parsed tree, which is not evaluated yet, is weighed before anything computes with it. What is left may
still take long; the libraries' own time-outs work by a signal that only a main thread can set, so they are switched
off, and deadlines are kept from outside, by the pool of verifier processes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

MAX_LENGTH = 512
"""Characters past which an expression is compared as a string only."""
MAX_DEPTH = 12
"""Nested braces past which an expression is compared as a string only."""
MAX_BITS = 20_000
"""Size that a number inside an expression may have if it were computed."""
MAX_NODES = 1000
MAX_POWER = 50
"""Exponent up to which a sum may be expanded."""
POINTS = (
    ("1371/1009", "1777/1103", "853/1201", "1999/1301", "757/1409", "1663/1511", "911/1607", "1889/1709"),
    ("641/1013", "1583/1109", "1447/1213", "823/1303", "2011/1423", "947/1523", "1721/1609", "1063/1721"),
    ("1787/1019", "709/1117", "1877/1217", "1129/1307", "1493/1427", "2003/1531", "1231/1613", "947/1723"),
)
"""Values for up to eight variables: positive, so that roots and logarithms of them are real."""
SIGNS = ((-1,) * 8, (-1, 1) * 4, (1, -1) * 4)
"""Of variables, where both expressions are real then: `|x|` is not `x`."""
_TINY = 1e-100

# Evaluated while parsing, or by operations that the weight of a tree does not bound.
_REFUSED = re.compile(
    r"\\(?:sum|prod|i*nt|oint|lim|limsup|liminf|det|begin|gcd|lcm|operatorname|pmod|bmod|mod)(?![a-zA-Z])"
    r"|\\binom(?=.*\d{4})|\\text|\d\s+\d|\d\s*_|(?<![\\a-zA-Z])[a-zA-Z]{5,}|!\s*[)}\]]*\s*!|\d{300}|'|%|\?|\"|=|<|>|\\[lgn]e(?![a-zA-Z])"
)
_ANGLE = re.compile(r"(\d+(?:\.\d+)?|\\frac\{[^{}]*\}\{[^{}]*\})\s*\^\{\\circ\}")


def equal_symbolically(given: str, wanted: str) -> bool:
    """Whether two tidy expressions are equal: of the same value at points chosen at random, to 20 digits; where they
    have no value there (unknown functions, conditions), by math-verify. False if either is refused."""
    left, right = expression(given), expression(wanted)
    if left is None or right is None:
        return False
    try:
        names = _names(left, right)
        agree = [_agree(_at(left, names, point), _at(right, names, point)) for point in POINTS[: 3 if names else 1]]
        if None not in agree:
            return all(agree) and _agree_below_zero(left, right, names)
        if _high(left) or _high(right):
            return False  # the library would expand it
        return bool(_library().verify([right], [left], timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:
        # The libraries fail in many ways on what is no mathematics. That it equals the reference is then not shown.
        return False


def equal_equations(given: tuple[str, str], wanted: tuple[str, str]) -> bool:
    """Whether two equations, each by its sides, say the same: left less right, they differ by a factor."""
    sides = [expression(side) for side in (*given, *wanted)]
    if any(side is None for side in sides):
        return False
    try:
        one, other = sides[0] - sides[1], sides[2] - sides[3]
        names = _names(one, other)
        values = [(_at(one, names, point), _at(other, names, point)) for point in POINTS]
        if any(not (abs(a) > _TINY and abs(b) > _TINY) for a, b in values):
            return False
        first = values[0][0] / values[0][1]
        values += [pair for pair in _below_zero(one, other, names) if abs(pair[0]) > _TINY or abs(pair[1]) > _TINY]
        return all(abs(b) > _TINY and _agree(a / b, first) for a, b in values)
    except MemoryError:
        raise
    except Exception:
        return False


def _agree_below_zero(one: Any, other: Any, names: Sequence[str]) -> bool:
    return all(_agree(a, b) is not False for a, b in _below_zero(one, other, names))


def _below_zero(one: Any, other: Any, names: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """The values of two expressions with some variables negative, where both are real in all their parts: roots of what
    is negative are not, and whoever writes them takes the variables for positive."""
    symbols = [symbol for tree in (one, other) for symbol in tree.free_symbols]
    if not names or all(tree.is_rational_function(*symbols) for tree in (one, other)):
        return  # equal for positive numbers, equal for all
    seen = set[tuple[int, ...]]()
    for pattern in SIGNS:
        signs = pattern[: len(names)]
        if min(signs) > 0 or signs in seen:
            continue
        seen.add(signs)
        point = tuple(f"{'-' * (sign < 0)}{size}" for sign, size in zip(signs, POINTS[0], strict=False))
        if _real(one, names, point) and _real(other, names, point):
            yield _at(one, names, point), _at(other, names, point)


def _real(tree: Any, names: Sequence[str], point: tuple[str, ...]) -> bool:
    """Whether an expression has a real value there, and so have all roots and logarithms in it."""
    sympy = _sympy()
    for part in sympy.preorder_traversal(tree):
        inner = None
        if part.is_Pow and not part.exp.is_Integer:
            inner = part.base
        elif isinstance(part, sympy.log):
            inner = part.args[0]
        if inner is not None and inner != sympy.E:
            value = _at(inner, names, point)
            if not (value.is_real and value >= 0):
                return False
    return bool(_at(tree, names, point).is_real)


def _high(tree: Any) -> bool:
    """Whether there is a sum to a power in it that is too high to be expanded."""
    sympy = _sympy()
    return any(
        part.base.has(sympy.Add)
        and part.free_symbols
        and part.exp.is_number
        and not (part.exp.is_Rational and abs(part.exp) <= MAX_POWER)
        for part in tree.atoms(sympy.Pow)
    )


def numeric(text: str) -> Fraction | None:
    """The value of a tidy expression without variables, to some 30 digits; None if it has none that is real."""
    tree = expression(text)
    if tree is None or getattr(tree, "free_symbols", True):
        return None
    try:
        number = tree.doit().evalf(40)
        return Fraction(str(number)) if number.is_Float or number.is_Rational else None
    except MemoryError:
        raise
    except Exception:
        return None


def expression(text: str) -> Any:
    """The unevaluated sympy expression of a tidy text; None if it is refused or is none."""
    if len(text) > MAX_LENGTH or _REFUSED.search(text):
        return None
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])", text):
        text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    if "^{\\circ}" in text:
        return None
    try:
        tree = _parse(text)
        if tree is None or _nodes(tree) > MAX_NODES or _bits(tree) > MAX_BITS:
            return None
        sympy = _sympy()
        return tree.xreplace({number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)})
    except MemoryError:
        raise
    except Exception:
        return None


@cache
def _target() -> Any:
    from latex2sympy2_extended import NormalizationConfig

    # No units: what is left in an expression by now is part of it.
    spelling = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    return _library().LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)


def _parse(text: str) -> Any:
    # LaTeX only: the plain-expression parser of the library hands text to Python's eval.
    parsed = _library().parse(f"\\boxed{{{text}}}", extraction_config=[_target()], parsing_timeout=None)
    tree = parsed[0] if parsed else None
    return None if isinstance(tree, str) or not isinstance(tree, _sympy().Expr) else tree


def _nodes(tree: Any) -> int:
    count, stack = 0, [tree]
    while stack and count <= MAX_NODES:
        count += 1
        stack.extend(stack.pop().args)
    return count


def _bits(tree: Any) -> float:
    """A bound on the bits of the largest number that evaluating `tree` makes, infinity if it is far too large."""
    sympy = _sympy()
    if tree.is_Rational:
        return max(int(tree.p).bit_length(), int(tree.q).bit_length())
    if not tree.args:
        return 8.0
    inner = [_bits(argument) for argument in tree.args]
    if max(inner) > MAX_BITS:
        return math.inf
    if isinstance(tree, sympy.Mul):
        return float(sum(inner))
    if isinstance(tree, sympy.Pow | sympy.exp):
        exponent = tree.args[-1]
        base = inner[0] if isinstance(tree, sympy.Pow) else 2.0
        if exponent.is_Rational:
            size = abs(float(exponent))
        else:
            size = 2.0 ** min(inner[-1], 64.0) if exponent.is_number and not exponent.is_Atom else 8.0
        return float(max(base, base * size))
    if tree.func.__name__ in ("factorial", "factorial2", "gamma", "binomial", "subfactorial"):
        size = 2.0 ** min(max(inner), 64.0)
        return float(size * max(1.0, math.log2(size)))
    if tree.func.__name__ in ("Sum", "Product", "Integral", "Derivative", "Limit"):
        return math.inf
    return float(max(inner) + len(inner))


def _names(*trees: Any) -> list[str]:
    """The variables, sorted, without `i`."""
    return sorted({symbol.name for tree in trees for symbol in tree.free_symbols} - {"i"})


def _at(tree: Any, names: Sequence[str], point: tuple[str, ...]) -> Any:
    """The complex value with the variables `names` at `point`; `i` is the imaginary unit."""
    sympy = _sympy()
    if len(names) > len(point):
        raise ValueError("too many variables")
    at = {name: sympy.Rational(value) for name, value in zip(names, point, strict=False)} | {"i": sympy.I}
    value = tree.subs({symbol: at[symbol.name] for symbol in tree.free_symbols}).doit()
    return value if value.is_Rational else value.evalf(30)


def _agree(one: Any, other: Any) -> bool | None:
    """Whether two values are the same to 20 digits; None if one is none, or both are too small to tell."""
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
        return None
    size = max(abs(one), abs(other))
    if size < _TINY:
        return None
    return bool(abs(one - other) <= size * 10**-20)


@cache
def _library() -> Any:
    """math-verify, imported at first need: it takes a second, and exact answers do without it."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


@cache
def _sympy() -> Any:
    import sympy

    return sympy


def warm() -> None:
    """Import and exercise the symbolic step, so that the first check's deadline does not pay for it."""
    equal_symbolically("x+1", "1+x")
    equal_equations(("y", "x+1"), ("y-x", "1"))
    numeric(r"\sqrt{2}")
