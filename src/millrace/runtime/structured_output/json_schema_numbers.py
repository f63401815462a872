"""Numbers of JSON schemas, as llguidance can enforce them exactly: it reads each as a float64."""

import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from millrace.errors import RequestError

Refuse = Callable[[str, str, str], RequestError]
Schema = dict[str, Any]

EXACT = 2**53  # from here on not every integer is a float64
INT64_LOW, INT64_HIGH = -(2**63), 2**63 - 1
# The float64 just above -2^63, which itself overflows in llguidance.
LOWEST = INT64_LOW + 1024
NARROWED = 1e-9  # distance from an exclusive bound that cannot be enforced otherwise
MAX_STEP = 10**7  # of `multipleOf`, without its decimal point: an answer's state is the remainder
# Without an upper bound llguidance needs a power of ten above the lower one, in 64 bits.
OPEN_ENDED = 10**18
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class NumberBounds:
    """The numeric keywords of one schema. combines: those of other schemas may apply to the same number"""

    def __init__(self, schema: Schema, path: str, refuse: Refuse, combines: bool) -> None:
        self._schema, self._path, self._refuse, self._combines = schema, path, refuse, combines

    def simplify(self, types: frozenset[str]) -> None:
        """Make bounds exact, and integers' bounds inclusive. raises RequestError if that is not possible"""
        schema = self._schema
        if not types & {"number", "integer"}:
            for key in (*LOWER, *UPPER, "multipleOf"):
                schema.pop(key, None)
            return
        for bound, exclusive in (LOWER, UPPER):  # draft 4 has a boolean beside the bound
            if schema.get(exclusive) is True and is_number(schema.get(bound)):
                schema[exclusive] = schema.pop(bound)
            elif isinstance(schema.get(exclusive), bool):
                del schema[exclusive]
        for key in (*LOWER, *UPPER):
            if key in schema and not is_number(schema[key]):
                raise self._refuse(f'"{key}" at {self._path} is {schema[key]!r:.60}', "a number", "")
            if key in schema:
                schema[key] = self._exact(key, schema[key])
        if "number" in types:
            self._narrow_reals()
            self._narrow_exclusive()
        else:
            self._narrow_integers()
        if is_number(schema.get("multipleOf")):
            self._check_step(schema["multipleOf"], "number" not in types)

    def _exact(self, key: str, value: float) -> float:
        """Return the bound, an integer as int."""
        if isinstance(value, int):
            return value
        if not math.isfinite(value) or abs(value) >= EXACT:
            raise self._inexact(key, value)
        return int(value) if value.is_integer() else value

    def _inexact(self, key: str, value: object) -> RequestError:
        return self._refuse(
            f'"{key}" at {self._path} is {value!s:.60}, which cannot be enforced exactly',
            f"a number between -2^53 and 2^53 (or, inclusive, an int64 bound: {INT64_LOW} or {INT64_HIGH})",
            "",
        )

    def _narrow_reals(self) -> None:
        for key in (*LOWER, *UPPER):
            value = self._schema.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
                if value in (INT64_LOW, INT64_HIGH):
                    self._schema[key] = LOWEST if value < 0 else -LOWEST
                elif abs(value) > INT64_HIGH or int(float(value)) != value or key.startswith("exclusive"):
                    raise self._inexact(key, value)  # together with "integer" elsewhere, 1 is added to exclusive ones

    def _narrow_exclusive(self) -> None:
        """Replace an exclusive bound n if the other one lies within the same unit: llguidance would allow n itself."""
        schema = self._schema
        for key, inclusive, opposite in ((LOWER[1], LOWER[0], UPPER), (UPPER[1], UPPER[0], LOWER)):
            bound = schema.get(key)
            limits = [schema[other] for other in opposite if is_number(schema.get(other))]
            if not isinstance(bound, int) or not (self._combines or any(abs(limit - bound) < 1 for limit in limits)):
                continue
            nearest = bound + NARROWED if key in LOWER else bound - NARROWED
            if nearest == bound:
                raise self._inexact(key, bound)
            del schema[key]
            here = schema.get(inclusive, nearest)
            schema[inclusive] = max(here, nearest) if key in LOWER else min(here, nearest)

    def _narrow_integers(self) -> None:
        """Replace the bounds of an integer by inclusive ones that float64 and int64 represent."""
        schema = self._schema
        lows = [low for key in LOWER if (low := self._inclusive(key)) is not None]
        highs = [high for key in UPPER if (high := self._inclusive(key)) is not None]
        low, high = (
            (max(lows, key=lambda b: b[1]) if lows else None),
            (min(highs, key=lambda b: b[1]) if highs else None),
        )
        for key in (*LOWER, *UPPER):
            if is_number(schema.get(key)):
                del schema[key]
        if low is not None:
            bound = LOWEST if low[1] == INT64_LOW else low[1]
            too_open = high is None and bound >= OPEN_ENDED
            if too_open or not LOWEST <= bound <= INT64_HIGH or not _is_int64_float(bound):
                raise self._inexact(low[0], low[2])
            schema["minimum"] = bound
        if high is not None:
            too_open = low is None and high[1] <= -OPEN_ENDED
            if too_open or not LOWEST <= high[1] <= INT64_HIGH or not _is_int64_float(high[1]):
                raise self._inexact(high[0], high[2])
            schema["maximum"] = high[1]

    def _inclusive(self, key: str) -> tuple[str, int, float] | None:
        """Return the keyword, the outermost integer that it allows, and its value as the client sent it."""
        value = self._schema.get(key)
        if not is_number(value):
            return None
        assert isinstance(value, int | float)
        if key in LOWER:
            return key, math.floor(value) + 1 if key.startswith("exclusive") else math.ceil(value), value
        return key, math.ceil(value) - 1 if key.startswith("exclusive") else math.floor(value), value

    def _check_step(self, step: float, integer: bool) -> None:
        """Check that llguidance's conversion of `multipleOf` to a decimal is exact."""
        if not math.isfinite(step) or step <= 0:
            raise self._refuse(f'"multipleOf" at {self._path} is {step!s:.40}', "a number above 0", "")
        if isinstance(step, float) and step.is_integer() and step < EXACT:
            step = int(step)
        self._schema["multipleOf"] = step
        if integer and step == 1:
            del self._schema["multipleOf"]
            return
        coefficient, n_digits = float(step) if step < EXACT else math.inf, 0
        while coefficient <= MAX_STEP and not coefficient.is_integer():
            coefficient, n_digits = coefficient * 10, n_digits + 1
        if coefficient > MAX_STEP or Decimal(coefficient).scaleb(-n_digits) != Decimal(repr(step)):
            raise self._refuse(
                f'"multipleOf" at {self._path} is {step!s:.60}, which cannot be enforced exactly',
                f"a decimal with fewer digits, or at most {MAX_STEP}", "",
            )  # fmt: skip


def _is_int64_float(value: int) -> bool:
    """llguidance saturates 2^63 to the largest int64."""
    return value == INT64_HIGH or int(float(value)) == value


def check_steps(steps: Iterable[Decimal], refuse: Refuse) -> None:
    """Check the least common multiple of all steps, which llguidance forms in 32 bits."""
    n_digits = max(max(0, -int(step.as_tuple().exponent)) for step in steps)
    common = 1
    for step in steps:
        scaled = int(step.scaleb(n_digits))
        if common * scaled >= 2**32 or math.lcm(common, scaled) > MAX_STEP:
            raise refuse('its "multipleOf" values together cannot be enforced', "fewer digits of them", "")
        common = math.lcm(common, scaled)


def check_constant(value: object, path: str, refuse: Refuse) -> None:
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict | list):
            todo += part.values() if isinstance(part, dict) else part
        elif is_number(part):
            assert isinstance(part, int | float)
            is_exact = (
                abs(part) < EXACT if isinstance(part, float) else abs(part) <= INT64_HIGH and int(float(part)) == part
            )
            if not is_exact:
                raise refuse(
                    f"{path} has {part!s:.60}, which cannot be enforced exactly",
                    "numbers between -2^53 and 2^53", "send larger ones as strings",
                )  # fmt: skip
