"""Tensors of a bitsandbytes folder, by the names of the layers they belong to.

4 bits, of a layer `q_proj.weight` (N, K), whose numbers lie in one row after the other:

    weight                uint8 (N K / 2, 1), the first code of two in the high half
    weight.quant_map      float32 (16), the number of each code
    weight.absmax         float32 (blocks), the scale of each block of, mostly, 64 numbers
    weight.quant_state.bitsandbytes__nf4 (or __fp4)   uint8, JSON: shape, blocksize, ...
    nested: absmax is uint8, an index into weight.nested_quant_map (256), times weight.nested_absmax of, mostly, 256
            blocks, plus nested_offset

8 bits: weight int8 (N, K), SCB float32 (N), weight_format uint8 (); w = code * SCB / 127

The engine has no such codes: matrices are read as floats.
source: bitsandbytes, functional.py (QuantState) and nn/modules.py
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.bitsandbytes.scheme import BitsAndBytes
from millrace.checkpoint.weights.safetensors import FLOAT_NAMES, Array, TensorInfo, Tensors
from millrace.errors import CheckpointError

NAMES = {"U8": "uint8", "I8": "int8"}  # in addition to floating-point types
WEIGHT, MAP, ABSMAX, STATE = ".weight", ".quant_map", ".absmax", ".quant_state.bitsandbytes__"
NESTED_MAP, NESTED_ABSMAX = ".nested_quant_map", ".nested_absmax"
SCALES, LAYOUT = ".SCB", ".weight_format"
_TYPES = ("nf4", "fp4")
_MAX_STATE = 4096  # bytes
_MAX_BLOCK = 1 << 20
_ROW_MAJOR = 0  # the only layout that can be saved
_AGAIN = "download or copy the checkpoint again, or choose the original one"


@dataclass(frozen=True, slots=True)
class _State:
    """What the JSON beside a matrix says. nested: numbers of absmax that share a scale; 0 if absmax is floats"""

    shape: tuple[int, int]
    block: int
    nested: int = 0
    offset: float = 0.0

    @property
    def n_blocks(self) -> int:
        return -(-self.shape[0] * self.shape[1] // self.block)


class BitsAndBytesTensors(Tensors):
    """Tensors of such a folder: `load` returns floats."""

    def __init__(
        self, infos: dict[str, TensorInfo], parts: Tensors, states: Mapping[str, _State], eight: frozenset[str]
    ) -> None:
        super().__init__(infos, parts.states)
        self._parts, self._of_layers, self._eight = parts, dict(states), eight

    @classmethod
    def from_folder(cls, folder: Path, scheme: BitsAndBytes) -> "BitsAndBytesTensors":
        """Open a folder; reads headers, and the states of its matrices. raises CheckpointError"""
        parts = Tensors.open(folder, NAMES)
        states, eight, used = dict[str, _State](), set[str](), set[str]()
        infos = dict[str, TensorInfo]()
        for name, info in parts.items():
            if not name.endswith(WEIGHT) or info.dtype not in NAMES.values():
                continue
            module = name.removesuffix(WEIGHT)
            if (info.dtype == "uint8") != (scheme.bits == 4):
                raise CheckpointError(f"{name} is {info.dtype}", f"codes of {scheme.bits} bits, by config.json", _AGAIN)
            if scheme.bits == 4:
                states[name] = _state(parts, name)
                shape, suffixes = states[name].shape, (MAP, ABSMAX, NESTED_MAP, NESTED_ABSMAX, *_states_of(parts, name))
                used.update(name + suffix for suffix in suffixes)
            else:
                shape = _check_eight(parts, module)
                eight.add(name)
                used.update((module + SCALES, module + LAYOUT))
            infos[name] = TensorInfo(name, shape, f"bnb{scheme.bits}", info.file, info.nbytes, info.offset)
        for name, info in parts.items():
            if name in used or name in infos:
                continue
            if info.dtype not in FLOAT_NAMES:
                raise CheckpointError(f"{name} ({info.dtype}) belongs to no quantized layer", "floats", _AGAIN)
            infos[name] = info
        if not states and not eight:
            what = f"{folder} has no quantized layer, and config.json says {scheme.bits} bits"
            raise CheckpointError(what, "codes of bitsandbytes", _AGAIN)
        return cls({name: infos[name] for name in parts if name in infos}, parts, states, frozenset(eight))

    @property
    def notes(self) -> tuple[str, ...]:
        n = len(self._of_layers) + len(self._eight)
        return (
            *self._parts.notes,
            f"{n} matrices of bitsandbytes run as bfloat16 by default, in more memory than the file's: name a "
            "precision, such as w8a16, to round them again",
        )

    def renamed(self, old: str, new: str) -> "BitsAndBytesTensors":
        """Return the tensors with one renamed. raises CheckpointError if `old` is quantized"""
        if old in self._of_layers or old in self._eight:
            raise CheckpointError(
                f"{old} is quantized, and stands for {new}, which is missing", f"{new} as floats", _AGAIN
            )
        infos = {new if name == old else name: info for name, info in self._infos.items()}
        return BitsAndBytesTensors(infos, self._parts.renamed(old, new), self._of_layers, self._eight)

    def load(self, name: str) -> Array:
        if name in self._of_layers:
            return self._four_bits(name, self._of_layers[name])
        if name not in self._eight:
            return super().load(name)
        scales = _finite(self._parts, name.removesuffix(WEIGHT) + SCALES)
        result: Array = self._parts.load(name) * (scales / np.float32(127))[:, None]
        return result

    def _four_bits(self, name: str, state: _State) -> NDArray[np.float32]:
        packed = self._parts.load(name).reshape(-1)
        values = _finite(self._parts, name + MAP)
        scales = self._absmax(name, state)
        N, K = state.shape
        result = np.empty(2 * len(packed), np.float32)
        result[::2], result[1::2] = values[packed >> np.uint8(4)], values[packed & np.uint8(15)]
        n_in_blocks = N * K // state.block * state.block
        by_block = result[:n_in_blocks].reshape(-1, state.block)
        by_block *= scales[: len(by_block), None]
        result[n_in_blocks : N * K] *= scales[-1]
        return result[: N * K].reshape(N, K)

    def _absmax(self, name: str, state: _State) -> NDArray[np.float32]:
        if not state.nested:
            return _finite(self._parts, name + ABSMAX)
        values = _finite(self._parts, name + NESTED_MAP)[self._parts.load(name + ABSMAX)]
        scales = np.repeat(_finite(self._parts, name + NESTED_ABSMAX), state.nested)[: state.n_blocks]
        return values * scales + np.float32(state.offset)


def _states_of(parts: Tensors, name: str) -> list[str]:
    return [STATE + kind for kind in _TYPES if name + STATE + kind in parts]


def _state(parts: Tensors, name: str) -> _State:
    """Return the state of a matrix after checking all its tensors. raises CheckpointError"""
    names = _states_of(parts, name)
    if len(names) != 1:
        raise CheckpointError(f"{name} has {len(names)} states", f"one of {name}{STATE}nf4 and fp4", _AGAIN)
    info = parts[name + names[0]]
    if info.dtype != "uint8" or info.nbytes > _MAX_STATE:
        raise CheckpointError(f"{info.name} has {info.nbytes} bytes of {info.dtype}", "JSON as uint8", _AGAIN)
    try:
        raw = json.loads(parts.load(info.name).tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{info.name} is not JSON: {error}", "the state of a matrix", _AGAIN) from None
    state = _parsed(info.name, raw)
    n, n_blocks = state.shape[0] * state.shape[1], state.n_blocks
    _check(parts, name, "uint8", (-(-n // 2), 1), (-(-n // 2),), (1, -(-n // 2)))
    _check(parts, name + MAP, "float32", (16,))
    _check(parts, name + ABSMAX, "uint8" if state.nested else "float32", (n_blocks,))
    if state.nested:
        _check(parts, name + NESTED_MAP, "float32", (256,))
        _check(parts, name + NESTED_ABSMAX, "float32", (-(-n_blocks // state.nested),))
    return state


def _parsed(name: str, raw: Any) -> _State:
    """Return the state of a JSON document. raises CheckpointError"""
    if not isinstance(raw, dict):
        raise CheckpointError(f"{name} is no JSON object", "the state of a matrix", _AGAIN)
    shape, nested, offset = raw.get("shape"), raw.get("nested_blocksize", 0), raw.get("nested_offset", 0.0)
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
        raise CheckpointError(f"{name}: shape is {shape!r:.100}", "[N, K]", _AGAIN)
    for key, value, low in (("blocksize", raw.get("blocksize"), 2), ("nested_blocksize", nested, 0)):
        if type(value) is not int or not low <= value <= _MAX_BLOCK or value % 2:
            raise CheckpointError(f"{name}: {key} is {value!r:.100}", f"an even number up to {_MAX_BLOCK}", _AGAIN)
    if type(offset) not in (int, float) or not np.isfinite(offset):
        raise CheckpointError(f"{name}: nested_offset is {offset!r:.100}", "a number", _AGAIN)
    return _State((shape[0], shape[1]), raw["blocksize"], nested, float(offset))


def _check_eight(parts: Tensors, module: str) -> tuple[int, int]:
    info = parts[module + WEIGHT]
    if len(info.shape) != 2 or 0 in info.shape:
        raise CheckpointError(f"{info.name} is {info.shape}", "a matrix (N, K)", _AGAIN)
    _check(parts, module + SCALES, "float32", (info.shape[0],))
    if module + LAYOUT in parts:
        _check(parts, module + LAYOUT, "uint8", (), (1,))
        if (layout := int(parts.load(module + LAYOUT).reshape(-1)[0])) != _ROW_MAJOR:
            raise CheckpointError(f"{module}{LAYOUT} is {layout}", f"{_ROW_MAJOR}: rows, one after the other", _AGAIN)
    return info.shape[0], info.shape[1]


def _check(parts: Tensors, name: str, dtype: str, *shapes: tuple[int, ...]) -> None:
    info = parts.get(name)
    if info is None:
        raise CheckpointError(f"the checkpoint has no tensor {name}", "all parts of a quantized layer", _AGAIN)
    if info.dtype != dtype or info.shape not in shapes:
        raise CheckpointError(f"{name} is {info.shape} {info.dtype}", f"{dtype} {shapes[0]}", _AGAIN)


def _finite(parts: Tensors, name: str) -> NDArray[np.float32]:
    """Read floats. raises CheckpointError if one is no number"""
    values: NDArray[np.float32] = parts.load(name)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name} has values that are not finite", "numbers", _AGAIN)
    return values
