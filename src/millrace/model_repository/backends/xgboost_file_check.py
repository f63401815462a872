"""Check of XGBoost models in JSON or UBJSON before XGBoost reads them: complete, with valid tree indices.

XGBoost's readers trust the file: deep nesting or a truncated file crashes the process, and a child index outside of the
tree is followed.
"""

import json
import struct
from typing import Any

import numpy as np

from millrace.model_repository.request.status_code import invalid

_MAX_DEPTH = 200  # nesting depth; models have about ten
_NUMBERS = {b"i": ">i1", b"U": ">u1", b"I": ">i2", b"l": ">i4", b"L": ">i8", b"d": ">f4", b"D": ">f8"}
_CONSTANTS = {b"T": True, b"F": False, b"Z": None}
_NONE = -1  # child index of a leaf


def check_model(data: bytes, failure_text: str, *, is_json: bool) -> None:
    """Check a model. named: prefix of errors. raises StatusError"""
    if data[:1] != b"{":
        raise invalid(
            f"{failure_text}: it begins as neither JSON nor UBJSON; an old binary format, or a pickle, is not read"
        )
    try:
        model = _json(data) if is_json else _UbjsonReader(data).read()
        learner = model["learner"]
        n_features = int(learner["learner_model_param"]["num_feature"])
        booster = learner["gradient_booster"]
        booster = booster.get("gbtree", booster)  # dart nests its trees in a gbtree
        if booster["name"] == "gblinear":
            raise ValueError("it has no trees, booster gblinear")
        for i, tree in enumerate(booster["model"]["trees"]):
            _check_tree(tree, n_features, i)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, struct.error) as error:
        raise invalid(f"{failure_text}: it is no whole model of XGBoost: {type(error).__name__}: {error}") from None


def _json(data: bytes) -> Any:
    """Parse JSON with bounded nesting, unlike XGBoost's own reader. raises ValueError, RecursionError"""
    read = np.frombuffer(data, np.uint8)  # also counts brackets in strings, such as feature names
    steps = np.isin(read, list(b"[{")).astype(np.int8) - np.isin(read, list(b"]}")).astype(np.int8)
    if int(np.cumsum(steps, dtype=np.int64).max()) > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} brackets in one another")
    return json.loads(data)


def _check_tree(tree: Any, n_features: int, number: int) -> None:
    """Check a tree. raises ValueError if children, features or categories are missing, or children form a cycle"""
    n = int(tree["tree_param"]["num_nodes"])
    left, right, feature, kinds = (
        np.asarray(tree[key], np.int64) for key in ("left_children", "right_children", "split_indices", "split_type")
    )
    sizes = {len(tree[key]) for key in ("split_conditions", "default_left", "sum_hessian", "base_weights", "parents")}
    if n < 1 or {left.size, right.size, feature.size, kinds.size, *sizes} != {n}:
        raise ValueError(f"tree {number} has {n} nodes, and arrays of other sizes")
    inner, at = left != _NONE, np.arange(n)
    is_child = [(side[inner] > at[inner]) & (side[inner] < n) for side in (left, right)]
    if not (is_child[0] & is_child[1]).all() or (right[~inner] != _NONE).any():
        raise ValueError(f"tree {number} has a node whose children are not behind it in the tree")
    if ((feature[inner] < 0) | (feature[inner] >= n_features)).any():
        raise ValueError(f"tree {number} asks for a feature beyond {n_features}")
    begin, size, nodes = (np.asarray(tree[f"categories_{key}"], np.int64) for key in ("segments", "sizes", "nodes"))
    n_categories = len(tree["categories"])
    fits = begin.size == size.size == nodes.size and (begin >= 0).all() and (size >= 0).all()
    if not fits or (begin + size > n_categories).any() or set(nodes.tolist()) != set(at[kinds == 1].tolist()):
        raise ValueError(f"tree {number} has categories that are not there")


class _UbjsonReader:
    """Reader of UBJSON as written by XGBoost: length-prefixed strings, typed arrays as raw bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self) -> Any:
        """Read the whole model. raises ValueError, struct.error if it is truncated"""
        model = self._value(0)
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes behind its end")
        return model

    def _take(self, n: int) -> bytes:
        if not 0 <= n <= len(self._data) - self._at:
            raise ValueError(f"{n} bytes at {self._at} of {len(self._data)}")
        self._at += n
        return self._data[self._at - n : self._at]

    def _next(self) -> bytes:
        return self._data[self._at : self._at + 1]

    def _number(self, kind: bytes) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _length(self) -> int:
        n = self._number(self._take(1))
        if not isinstance(n, int) or not 0 <= n <= len(self._data):
            raise ValueError(f"a length of {n}")
        return n

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} brackets in one another")
        kind = self._take(1)
        if kind == b"{":
            fields = {}
            while self._next() != b"}":
                key = self._take(self._length()).decode()
                fields[key] = self._value(depth + 1)
            self._take(1)
            return fields
        if kind == b"[":
            return self._array(depth)
        if kind == b"S":
            return self._take(self._length()).decode()
        return _CONSTANTS[kind] if kind in _CONSTANTS else self._number(kind)

    def _array(self, depth: int) -> Any:
        if self._next() == b"$":
            dtype = np.dtype(_NUMBERS[self._take(2)[1:]])
            if self._take(1) != b"#":
                raise ValueError("an array of a type without its size")
            return np.frombuffer(self._take(self._length() * dtype.itemsize), dtype)
        if self._next() == b"#":
            self._take(1)
            return [self._value(depth + 1) for _ in range(self._length())]
        values = []
        while self._next() != b"]":
            values.append(self._value(depth + 1))
        self._take(1)
        return values
