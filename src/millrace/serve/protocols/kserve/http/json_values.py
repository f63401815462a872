"""Conversion of a tensor's JSON values to arrays, with the error texts of Triton's JSON."""

import re
from array import array
from typing import Any

import numpy as np

from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import BYTES, DTYPES, ONLY_BINARY, Array, objects

MAX_DEPTH = 100
_CODES = {"FP32": "f", "FP64": "d"}  # of the module array
_PLACE = re.compile(r"invalid character \(byte (\d+)\)$|^Expecting value: .*\(char (\d+)\)$")


def from_json(name: str, datatype: str, data: Any, n: int) -> Array:
    """Return a tensor's `data`, with any nesting, as a flat array. n: elements of its shape. raises StatusError"""
    flat = flat_array(name, datatype, data)
    if len(flat) != n:
        raise mismatch()
    return flat


def flat_array(name: str, datatype: str, data: Any) -> Array:
    """Return a tensor's `data` as a flat array of any length. raises StatusError"""
    if datatype in ONLY_BINARY:
        what = (
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
        raise invalid(what)
    kinds: set[type] = set(map(type, data)) if isinstance(data, list) else {list}
    flat = data
    if list in kinds:  # nested, or a value of its own
        flat = elements(data)
        kinds = set(map(type, flat))
    if datatype == BYTES:
        _only(kinds, {str}, "string", "string")
        return objects([text.encode("utf-8", "surrogatepass") for text in flat])
    if datatype in _CODES:
        _only(kinds, {int, float}, "number", "double")
        try:  # beyond FP32 is infinite, as in C
            return np.frombuffer(array(_CODES[datatype], flat), DTYPES[datatype])
        except OverflowError as error:
            raise parse_error("data", str(error)) from None
    if datatype == "BOOL":
        _only(kinds, {bool}, "boolean", "boolean")
    elif datatype[0] == "U":
        word = "unsigned-integer"
        _only(kinds, {int} if not flat or min(map(_number, flat)) >= 0 else set(), word, word)
    else:
        _only(kinds, {int}, "signed-integer", "signed-integer")
    try:
        return np.array(flat, dtype=DTYPES[datatype])
    except OverflowError as error:
        raise parse_error("data", str(error)) from None


def _number(value: Any) -> int | float:
    return value if isinstance(value, int | float) else -1


def _only(kinds: set[type], allowed: set[type], is_none: str, expected: str) -> None:
    if not kinds <= allowed:
        raise parse_error("data", not_a(is_none, expected))


def elements(data: Any) -> list[Any]:
    """Return the elements of a tensor in JSON as a flat list. raises StatusError"""
    return _flat(data, 0)


def _flat(data: Any, depth: int) -> list[Any]:
    if depth >= MAX_DEPTH:
        raise too_deep()
    if not isinstance(data, list):
        return [data]
    if list not in set(map(type, data)):
        return data
    return [value for part in data for value in _flat(part, depth + 1)]


def not_a(is_none: str, expected: str) -> str:
    return f"attempt to access JSON non-{is_none} as {expected}"


def parse_error(key: str, cause: str) -> StatusError:
    return StatusError(Code.INTERNAL, f"Unable to parse '{key}': {cause}")


def mismatch() -> StatusError:
    return parse_error("data", "Shape does not match true shape of 'data' field")


def too_deep() -> StatusError:
    return invalid(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def no_json(reason: object) -> StatusError:
    """Return the error of invalid JSON. reason: what is wrong, or the error of a parser, whose position is kept"""
    at = _PLACE.search(str(reason))
    where = f"Invalid value. at {at[1] or at[2]} " if at is not None else ""
    return invalid(f"failed to parse the request JSON buffer: {where}{f'({reason})' if where else reason}")
