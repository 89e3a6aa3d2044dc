r"""One spelling for what means the same on paper: LaTeX variants, layout, text commands, Unicode, currency.

Everything here is textual, in linear time, and keeps the meaning: nothing is dropped that a reader would see as part of
the answer. What cannot be spelled plainly stays as `\text{...}`.
"""

from __future__ import annotations

import re

CURRENCY = "¤"
"""Stands for an escaped or leading dollar sign while math delimiters are taken off."""

_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "°": r"^{\circ}",
        "π": r"\pi ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "²": "^{2}",
        "³": "^{3}",
        "％": "%",
        "，": ",",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]")
"""Characters of no width, which text that was copied has between others: no part of an answer."""

_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))|(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)")
_TEXT = re.compile(
    r"\\(text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|boldsymbol|bm)\s*\{([^{}]*)\}"
)
_DELIMITED = re.compile(
    r"\s*(?:\$\$?([^$]*)\$?\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|<answer>(.*)</answer>)\s*", re.S
)
_LEADING_DOLLAR = re.compile(r"([-+]?\s*)\$\s*(?=[\d.])")
_MONEY = re.compile(rf"([-+]?)\s*{CURRENCY}\s*([-+]?)([\d.,]*\d|[^ ]+)(.*)", re.S)
_POWER = re.compile(r"\^\s*(-?\d)")
_GROUP = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;: ]|~| )\s*\d{3})+(?![\d.]*\d)")

_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|(?:foot)?small|[lL]arge|[hH]uge)(?![a-zA-Z])", ""),
        (r",\s*\\!\s*|\{,\}\s*(?:\\!\s*)?", ","),
        (r"\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{matrix}"),
        (r"\\end\{array\}", r"\\end{matrix}"),
        (r"\\\\\s*\[[^\[\]]{0,20}\]", r"\\\\ "),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq?(?![a-zA-Z])", r"\\ne "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\degree(?![a-zA-Z])|\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?", r"^{\\circ}"),
        (r"\{([^{}]*?)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\\[a-zA-Z]+)\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\{:\}", ":"),
        (r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"\\(frac|sqrt)\s+(?=[\[{])", r"\\\1"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\}\s+\{", "}{"),
        (r"\^\s*([0-9]+|[a-zA-Z])", r"^{\1}"),
        (r"_\s*([0-9]+|[a-zA-Z])", r"_{\1}"),
        (r"(?<![\\a-zA-Z{])(?:pi)(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z{])(?:infinity|infty|oo)(?![a-zA-Z])", r"\\infty "),
        (r"\+\s*\\infty", r"\\infty"),
        (r"(?<=[\d}\s])\s*(?:per ?cent)(?![a-zA-Z])", "%"),
        (r"\*+", r"\\cdot "),
        (r"\\text\{\s*\}", ""),
    )
]
_ENDS = " \t\n.,;:"


def tidy(answer: str) -> str:
    r"""The answer in one spelling of LaTeX, words and spaces kept.

    >>> tidy(r"$\left( \dfrac12,\; 1{,}000\text{ cm} \right)$.")
    '( \\frac{1}{2}, 1,000\\text{cm} )'
    """
    text = _undelimited(INVISIBLE.sub("", answer))
    text = _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2] or m[3] or ''}}}", text.translate(_UNICODE))
    text = _TEXT.sub(_words, text)
    text = _GROUP.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.replace("\\%", "%")
    text = re.sub(r"\s+", " ", text).strip().removeprefix("=").strip().rstrip(_ENDS)
    if money := _MONEY.fullmatch(text):
        text = f"{money[1] or money[2]}{money[3]}\\text{{dollars}}{money[4]}"
    text = text.replace(CURRENCY, "")
    if whole := re.fullmatch(r"\\text\{([^{}]*)\}", text):
        text = whole[1].strip()
    return text


def key(text: str) -> str:
    """A tidy answer without the spaces that mean nothing: those between two digits or two letters stay."""
    return re.sub(r"\s+(?![0-9])|(?<![0-9])\s+", "", re.sub(r"(?<=[a-zA-Z])\s+(?=[a-zA-Z])", "\0", text)).replace(
        "\0", " "
    )


def _undelimited(answer: str) -> str:
    """Without `$`, `\\(`, `\\[`, emphasis around it; a dollar sign that means money becomes `CURRENCY`."""
    text = answer.replace("\\$", CURRENCY).strip().rstrip(_ENDS)
    for _ in range(4):
        match = _DELIMITED.fullmatch(text)
        if match is None:
            break
        text = next(group for group in match.groups() if group is not None).strip().rstrip(_ENDS)
    if text.count("$") == 1:
        text = _LEADING_DOLLAR.sub(rf"\1{CURRENCY}", text)
    return text.replace("$", "")


def _words(match: re.Match[str]) -> str:
    r"""What a text command holds: plain if it is mathematics or joins it, else `\text{...}`."""
    command, content = match[1], match[2].strip()
    if not content:
        return " "
    if content in ("and", "or"):
        return f" {content} "
    if re.fullmatch(r"(?:per ?cent|\\?%)", content):
        return "%"
    if (
        command in ("mathbf", "boldsymbol", "bm", "mathit")
        or content[0].isdigit()
        or not re.search("[a-zA-Z]", content)
    ):
        return content
    if re.fullmatch("[A-Z]", content) and not match.string[: match.start()].rstrip()[-1:].isdigit():
        return content
    if re.fullmatch(r"\(?[a-zA-Z][).:]", content) or (command == "mathrm" and content in ("i", "e", "d")):
        return content
    return f"\\text{{{content}}}" if "^" not in content else _POWER.sub(r"}^{\1}\\text{", f"\\text{{{content}}}")
