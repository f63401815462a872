"""Dimensions: numbers, symbols, and expressions of them, in one canonical form so that equal ones compare equal.

N*H/2         Product: an exact quotient; a run in which it leaves a remainder is refused
(H + 1)//2    Floor: the number of windows along a dimension; for H - 2 it is windows of stride 1

Expressions are made with `*`, `/` (or `//`, which is exact, too) and window_count(); text is read by parse_dim().
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from millrace.errors import GraphError

MAX_TEXT_LENGTH, _MAX_LEVELS = 200, 16  # characters and nested brackets of a dimension's text
_TOKEN = re.compile(r"\s*(\d+|[^\W\d]\w*|//|[-+*/()])")


class NotWholeError(Exception):
    """A quotient is not an integer for these sizes."""


class _Dimension:
    """Arithmetic of dimensions that are not numbers."""

    __slots__ = ()

    def __mul__(self, other: Dim) -> Dim:
        return times(self, other)  # type: ignore[arg-type]

    __rmul__ = __mul__

    def __truediv__(self, other: Dim) -> Dim:
        return divide(self, other)  # type: ignore[arg-type]

    __floordiv__ = __truediv__

    def __rtruediv__(self, other: Dim) -> Dim:
        return divide(other, self)  # type: ignore[arg-type]

    __rfloordiv__ = __rtruediv__

    def _unknown(self, other: object) -> bool:
        raise GraphError(
            f"the dimension {self!r} is compared with {other!r}", "sizes that are known while the model is traced",
            "write forward() so that it holds for any size: what it does is fixed when it is traced",
        )  # fmt: skip

    __lt__ = __le__ = __gt__ = __ge__ = _unknown


@dataclass(frozen=True, slots=True, repr=False)
class Symbol(_Dimension):
    """A dimension known only at run time. It belongs to the graph whose inputs have it; engines set its bounds."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, repr=False)
class Floor(_Dimension):
    """(of + add) // by, rounded down; made only by window_count() and parse_dim()."""

    of: Symbol | Product
    add: int
    by: int

    def __repr__(self) -> str:
        inner = f"{self.of!r} {'-' if self.add < 0 else '+'} {abs(self.add)}" if self.add else f"{self.of!r}"
        if self.by == 1:
            return inner
        return f"{inner if isinstance(self.of, Symbol) and not self.add else f'({inner})'}//{self.by}"


@dataclass(frozen=True, slots=True, repr=False)
class Product(_Dimension):
    """numerator / denominator times each factor to its power; factors sorted by their texts, powers not 0."""

    numerator: int
    denominator: int
    factors: tuple[tuple[Symbol | Floor, int], ...]

    def __repr__(self) -> str:
        above = [str(self.numerator)] * (self.numerator != 1)
        below = [str(self.denominator)] * (self.denominator != 1)
        for factor, power in self.factors:
            (above if power > 0 else below).extend([_bracketed(factor)] * abs(power))
        divisor = "*".join(below)
        text = "*".join(above) or "1"
        return text if not below else f"{text}/{divisor if len(below) == 1 else f'({divisor})'}"


Dim = int | Symbol | Product | Floor


def _bracketed(factor: Symbol | Floor) -> str:
    return repr(factor) if isinstance(factor, Symbol) else f"({factor!r})"


def times(a: Dim, b: Dim) -> Dim:
    """Return a * b."""
    return _product(a, b, 1)


def divide(a: Dim, b: Dim) -> Dim:
    """Return a / b, which must be exact. raises GraphError for numbers with a remainder, and for b = 0"""
    if _ratio(b) == 0:
        raise GraphError(f"the dimension {a!r} is divided by 0", "a divisor from 1 on", "correct the shape")
    return _product(a, b, -1)


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of all, such as the elements of a shape."""
    result: Dim = 1
    for d in dims:
        result = times(result, d)
    return result


def _product(a: Dim, b: Dim, power: int) -> Dim:
    ratio, powers = _ratio(a) * _ratio(b) ** power, dict(_factors(a))
    if ratio == 0:
        return 0
    for factor, n in _factors(b):
        powers[factor] = powers.get(factor, 0) + power * n
    factors = tuple(sorted(((f, n) for f, n in powers.items() if n), key=lambda pair: repr(pair[0])))
    if not factors:
        if ratio.denominator != 1:
            raise GraphError(f"the dimension {a!r} / {b!r}", "a whole number", "correct the shape")
        return ratio.numerator
    if ratio == 1 and len(factors) == 1 and factors[0][1] == 1:
        return factors[0][0]
    return Product(ratio.numerator, ratio.denominator, factors)


def _ratio(d: Dim) -> Fraction:
    if isinstance(d, Product):
        return Fraction(d.numerator, d.denominator)
    return Fraction(d if isinstance(d, int) else 1)


def _factors(d: Dim) -> tuple[tuple[Symbol | Floor, int], ...]:
    if isinstance(d, Product):
        return d.factors
    return () if isinstance(d, int) else ((d, 1),)


def floor_div(operand: Dim, add: int, divisor: int) -> Dim:
    """Return (operand + add) // divisor, rounded down."""
    if isinstance(operand, int):
        return (operand + add) // divisor
    if isinstance(operand, Floor):  # windows over windows are a single count
        return floor_div(operand.of, operand.add + add * operand.by, operand.by * divisor)
    if isinstance(operand, Product) and operand.denominator == 1:
        shared = math.gcd(operand.numerator, divisor)
        if shared > 1:
            return floor_div(divide(operand, shared), add // shared, divisor // shared)
        if divisor == 1 and (common := math.gcd(operand.numerator, add)) > 1:
            return times(common, floor_div(divide(operand, common), add // common, 1))
    return operand if not add and divisor == 1 else Floor(operand, add, divisor)


def window_count(size: Dim, kernel: int, stride: int, padding: int, dilation: int = 1) -> Dim:
    """Return how many windows lie along a dimension; below 1: none fits."""
    return floor_div(size, 2 * padding - (kernel - 1) * dilation - 1 + stride, stride)


def operands(d: Dim) -> tuple[Dim, ...]:
    """Return the operands of the last operation of an expression; each precedes it in the sizes of a program.

    A number or symbol has none; a Floor has what it counts; a Product has two: its factors or, with a divisor,
    numerator and denominator.
    """
    if isinstance(d, Floor):
        return (d.of,)
    if not isinstance(d, Product):
        return ()
    below = product(times_itself(factor, -power) for factor, power in d.factors if power < 0)
    if d.denominator != 1 or below != 1:
        above = product(times_itself(factor, power) for factor, power in d.factors if power > 0)
        return times(d.numerator, above), times(d.denominator, below)
    last = d.factors[-1][0]
    return divide(d, last), last


def has_divisor(d: Product) -> bool:
    """Whether it may not be an integer in some run."""
    return d.denominator != 1 or any(power < 0 for _, power in d.factors)


def times_itself(d: Dim, power: int) -> Dim:
    """Return d to a nonnegative power."""
    return product([d] * power)


def symbols_of(d: Dim) -> Iterator[Symbol]:
    """Yield the symbols that it depends on."""
    if isinstance(d, Symbol):
        yield d
    elif isinstance(d, Floor):
        yield from symbols_of(d.of)
    elif isinstance(d, Product):
        for factor, _ in d.factors:
            yield from symbols_of(factor)


def value_of(d: Dim, sizes: Mapping[Symbol, int]) -> int:
    """Return its number in a run. raises NotWholeError"""
    if isinstance(d, int):
        return d
    if isinstance(d, Symbol):
        return sizes[d]
    if isinstance(d, Floor):
        return (value_of(d.of, sizes) + d.add) // d.by
    result = Fraction(d.numerator, d.denominator)
    for factor, power in d.factors:
        at = value_of(factor, sizes)
        if at == 0 and power < 0:
            raise NotWholeError(d)
        result *= Fraction(at) ** power
    if result.denominator != 1:
        raise NotWholeError(d)
    return result.numerator


def range_of(d: Dim, ranges: Mapping[Symbol, tuple[int, int]]) -> tuple[int, int]:
    """Return the least and the greatest value for symbols in the given ranges, each from 1 on."""
    if isinstance(d, int):
        return d, d
    if isinstance(d, Symbol):
        return ranges[d]
    if isinstance(d, Floor):
        low, high = range_of(d.of, ranges)
        return (low + d.add) // d.by, (high + d.add) // d.by
    least = most = Fraction(d.numerator, d.denominator)
    for factor, power in d.factors:
        low, high = (max(1, n) for n in range_of(factor, ranges))
        least *= Fraction(low if power > 0 else high) ** power
        most *= Fraction(high if power > 0 else low) ** power
    return math.ceil(least), math.floor(most)


def parse_dim(text: str) -> Dim:
    """Parse repr() of a dimension, in any equal form. raises GraphError"""
    return _Parser(text).result


class _Parser:
    """Parses sum = term ["//" number] [("+" | "-") number], term = factor {("*" | "/") factor}; factor: also (sum)."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens, at = text, list[str](), 0
        if len(text) > MAX_TEXT_LENGTH:
            raise self._wrong()
        while at < len(text.rstrip()):
            result = _TOKEN.match(text, at)
            if not result:
                raise self._wrong()
            self._tokens.append(result[1])
            at = result.end()
        self._at = self._levels = 0
        self.result = self._sum()
        if self._at < len(self._tokens):
            raise self._wrong()

    def _wrong(self) -> GraphError:
        return GraphError(
            f"the dimension {self._text!r:.80}", 'a number, a name, or an expression like "N*H/2" or "(H + 1)//2"',
            "names are letters, digits and _, and begin with a letter",
        )  # fmt: skip

    def _next(self, *expected: str) -> str:
        """Return the next token if it is one of these; otherwise ""."""
        if self._at < len(self._tokens) and self._tokens[self._at] in expected:
            self._at += 1
            return self._tokens[self._at - 1]
        return ""

    def _number(self) -> int:
        token = self._take()
        if not token.isdecimal():
            raise self._wrong()
        return int(token)

    def _take(self) -> str:
        if self._at == len(self._tokens):
            raise self._wrong()
        self._at += 1
        return self._tokens[self._at - 1]

    def _sum(self) -> Dim:
        result = self._term()
        if self._next("//"):
            by = self._number()
            if by < 1:
                raise self._wrong()
            result = floor_div(result, 0, by)
        if sign := self._next("+", "-"):
            result = floor_div(result, self._number() * (1 if sign == "+" else -1), 1)
        return result

    def _term(self) -> Dim:
        result = self._factor()
        while sign := self._next("*", "/"):
            result = times(result, self._factor()) if sign == "*" else divide(result, self._factor())
        return result

    def _factor(self) -> Dim:
        token = self._take()
        if token == "(":
            self._levels += 1
            if self._levels > _MAX_LEVELS:
                raise self._wrong()
            result = self._sum()
            if not self._next(")"):
                raise self._wrong()
            self._levels -= 1
            return result
        if token.isdecimal():
            return int(token)
        if not (token[0].isalpha() or token[0] == "_"):
            raise self._wrong()
        return Symbol(token)
