"""Is this the right number? math-verify behind a gate that lets only plain numbers through.

What a policy writes may be `9^{9^{9^9}}`, on which a symbolic evaluator never returns, or nested brackets, on which
the LaTeX parser takes seconds; and time-outs by signal work in the main thread only. So a candidate is first held
against a flat grammar (numbers, fractions, four operators, 60 characters); only then is it parsed.
"""

import logging
import re
from functools import lru_cache
from typing import Any, Literal

AnswerFormat = Literal["any", "boxed"]

MAX_CANDIDATE_LENGTH = 60

_DIGITS = r"(?:\d[\d,]*(?:\.\d*)?|\.\d+)"
_FRACTION = rf"\\[dt]?frac\s*\{{\s*[-+]?{_DIGITS}\s*\}}\s*\{{\s*{_DIGITS}\s*\}}"
_TERM = rf"[-+]?\s*(?:{_DIGITS}|(?:\d+\s*)?{_FRACTION})"
_PLAIN = re.compile(rf"{_TERM}(?:\s*(?:[-+*/]|\\times|\\cdot|\\div)\s*{_TERM})*")

_NUMBER = re.compile(r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
_DECORATION = re.compile(r"\\text\s*\{[^{}]*\}|\\mathrm\s*\{[^{}]*\}|\\[,;! ]|\\left|\\right|\\?[$%]|[a-zA-Z]+\s*$")


def is_correct(text: str, answer: str, answer_format: AnswerFormat = "any") -> bool:
    """Whether the final answer in `text` equals the number `answer`.

    The final answer is the content of the last `\\boxed{…}`; with format `any`, else the last number of the text.
    Never raises and never hangs, whatever the text.
    """
    candidate = final_answer(text, answer_format)
    return candidate is not None and _equals(answer, candidate)


def final_answer(text: str, answer_format: AnswerFormat = "any") -> str | None:
    """The candidate that is graded, without units and decoration; None when there is none that may be parsed."""
    boxed = _last_boxed(text)
    if boxed is None and answer_format == "any":
        numbers = _NUMBER.findall(text[-4000:])
        boxed = numbers[-1] if numbers else None
    if boxed is None or len(boxed) > MAX_CANDIDATE_LENGTH:
        return None
    candidate = _DECORATION.sub("", boxed.rpartition("=")[2]).strip().rstrip(".")
    return candidate if _PLAIN.fullmatch(candidate) else None


def _last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` with its braces balanced."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if found and depth == 0:
            return rest[:position]
    return None


@lru_cache(maxsize=4096)
def _parse(candidate: str) -> list[Any]:
    # math-verify takes a second to import and builds regexes on first use.
    from math_verify import parse

    return parse(f"\\boxed{{{candidate}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _equals(answer: str, candidate: str) -> bool:
    from math_verify import verify

    for room in ("parser", "grader"):
        # They warn that time-outs are off; the gate above takes their place.
        logging.getLogger(f"math_verify.{room}").setLevel(logging.ERROR)
    return verify(_parse(answer), _parse(candidate), timeout_seconds=None)
