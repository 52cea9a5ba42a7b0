"""A pocket calculator for untrusted text: exact fractions, bounded in length, depth and size. Nothing is eval'ed.

sum     := product (("+" | "-") product)*
product := unary (("*" | "/") unary)*
unary   := "-" unary | power
power   := atom ("**" unary)?
atom    := number | "(" sum ")"
"""

import re
from fractions import Fraction

MAX_LENGTH = 200
MAX_BITS = 1000
"""Of a numerator or denominator: about 300 digits."""

_TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|\*\*|[-+*/()])\s*")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "**": 4}
_NEGATION = 3
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", ",": "", "$": "", "[": "(", "]": ")"})


class CalculatorError(ValueError):
    """The expression cannot be evaluated; the message is fit to show to the policy."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression with + - * / ** ^ and parentheses. Raises CalculatorError.

    Example: `evaluate("3*(4+5)/2") == Fraction(27, 2)`
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"longer than {MAX_LENGTH} characters")
    tokens = _tokenize(expression.translate(_SPELLINGS).replace("^", "**"))
    value = _parse(tokens, 1)
    if tokens:
        raise CalculatorError(f"unexpected {tokens[-1]!r}")
    return value


def show(value: Fraction) -> str:
    """Digits: exact for whole numbers below 10**15, else 10 significant ones."""
    if value.denominator == 1 and abs(value) < 10**15:
        return str(value.numerator)
    return f"{float(value):.10g}"


def _tokenize(text: str) -> list[str]:
    """In reverse, so that the next token is the last of the list."""
    tokens, position = [], 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculatorError(f"unexpected {text[position]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens[::-1]


def _parse(tokens: list[str], lowest: int) -> Fraction:
    """Take an operand and every operator that binds at least as tightly as `lowest`."""
    value = _operand(tokens)
    while tokens and _PRECEDENCE.get(tokens[-1], 0) >= lowest:
        operator = tokens.pop()
        # Powers group to the right, and may have a negative exponent; the others group to the left.
        right = _parse(tokens, _NEGATION if operator == "**" else _PRECEDENCE[operator] + 1)
        value = _bounded(_apply(operator, value, right))
    return value


def _operand(tokens: list[str]) -> Fraction:
    if not tokens:
        raise CalculatorError("the expression ends too early")
    token = tokens.pop()
    if token == "-":
        return -_parse(tokens, _NEGATION)
    if token == "(":
        value = _parse(tokens, 1)
        if not tokens or tokens.pop() != ")":
            raise CalculatorError("a ')' is missing")
        return value
    if token[0] not in "0123456789.":
        raise CalculatorError(f"unexpected {token!r}")
    return _bounded(Fraction(token))


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            if right == 0:
                raise CalculatorError("division by zero")
            return left / right
        case _:
            return _power(left, right)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("exponents must be whole numbers")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    # Checked before computing: this is the one operation whose result outgrows its operands.
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > 2 * MAX_BITS:
        raise CalculatorError("the number is too large")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("the number is too large")
    return value
