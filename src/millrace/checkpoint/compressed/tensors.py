"""Tensors of a compressed-tensors folder, by the names of the layers they belong to.

A layer `q_proj` is stored as several tensors; here it is `q_proj.weight` (N, K), like in other checkpoints:

    pack-quantized   weight_packed int32 (N, words), weight_shape int64 (2) = N, K
    others           weight int8 or E4M3 (N, K)
    all              weight_scale (N, G) or, per tensor, (1); with zero points weight_zero_point: int8 (N, G), or packed
                     along N: int32 (words, G)
    w = (code - zero) * scale
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.compressed.packing import unpack, words_of
from millrace.checkpoint.compressed.scheme import FP8 as FP8_CACHE
from millrace.checkpoint.compressed.scheme import STATIC_FP8, Compression, Scheme
from millrace.checkpoint.weights.integer_matrix import group_size, integer_floats, integer_format, integer_matrix
from millrace.checkpoint.weights.quantized_matrix import E4M3, FP8, QuantisedFormat, QuantisedMatrix
from millrace.checkpoint.weights.safetensors import FLOAT_NAMES, Array, TensorInfo, Tensors
from millrace.errors import CheckpointError

WEIGHT, PACKED, SHAPE = ".weight", ".weight_packed", ".weight_shape"
ZERO, SCALES = ".weight_zero_point", (".weight_scale", ".weight_scale_inv")
# in addition to floating-point types
NAMES = {"I8": "int8", "I32": "int32", "I64": "int64", "F8_E4M3": "float8_e4m3fn"}
_E4M3_NAN = 0x7F  # and the same with the sign bit
_UNSUPPORTED = (".weight_g_idx", ".weight_global_scale", ".input_global_scale")
_ALLOWED = (".input_scale", ".input_zero_point")  # of static FP8 activations; activations stay bfloat16 here
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale")  # of an FP8 KV cache; not used
_SCALES = ("float32", "float16", "bfloat16")
_TABLE = ".embed_tokens.weight"  # not a linear layer
_AGAIN = "download or copy the checkpoint again, or compress the original one with `millrace compress`"


@dataclass(frozen=True, slots=True)
class _CompressedMatrix:
    """One compressed matrix. group: for whole rows the length rounded up to a multiple of 4, as kernels require"""

    name: str
    scheme: Scheme
    shape: tuple[int, int]

    @property
    def group(self) -> int:
        return group_size(self.scheme.group, self.shape[1])

    @property
    def n_groups(self) -> int:
        return -(-self.shape[1] // self.group)


class CompressedTensors(Tensors):
    """Tensors of such a folder: `load` returns floats, exact within float32; `stored` returns the checkpoint's own
    codes."""

    def __init__(
        self,
        infos: dict[str, TensorInfo],
        parts: Tensors,
        layers: Mapping[str, _CompressedMatrix],
        kv: str | None = None,
    ) -> None:
        super().__init__(infos, parts.states)
        self.kv = kv
        self._parts, self._layers = parts, dict(layers)
        self._formats: dict[str, QuantisedFormat | None] = {}

    @classmethod
    def from_folder(cls, folder: Path, compression: Compression) -> "CompressedTensors":
        """Open a folder; reads headers, and the shapes stored next to packed words. raises CheckpointError"""
        parts = Tensors.open(folder, NAMES)
        infos: dict[str, TensorInfo] = {}
        layers: dict[str, _CompressedMatrix] = {}
        used: set[str] = set()
        for module in _compressed(parts):
            scheme = compression.scheme_of(module)
            if scheme is None:
                raise CheckpointError(
                    f"{folder}: {module} holds codes, and no scheme of config.json is about it",
                    "codes where config_groups say so, and ignore does not", _AGAIN,
                )  # fmt: skip
            layer = _layer(parts, module, scheme)
            own = [module + suffix for suffix in _own_parts(layer) if module + suffix in parts]
            used.update(own)
            first = parts[module + (PACKED if scheme.packed else WEIGHT)]
            size = sum(parts[name].nbytes for name in own)
            infos[layer.name] = TensorInfo(layer.name, layer.shape, scheme.dtype, first.file, size, first.offset)
            layers[layer.name] = layer
        for name, info in parts.items():
            if name in used or (compression.kv in (FP8_CACHE, STATIC_FP8) and name.endswith(_KV_SCALES)):
                continue
            _check_plain(name, info, compression)
            infos[name] = info
        return cls(infos, parts, layers, compression.kv)

    @property
    def notes(self) -> tuple[str, ...]:
        n, result = sum(layer.scheme.float_activations for layer in self._layers.values()), [*self._parts.notes]
        if n:
            result += [
                f"activations of {n} matrices stay bfloat16 here, where the checkpoint means FP8: closer, not faster"
            ]
        if self.kv == STATIC_FP8:
            result += [
                "keys and values stay bfloat16 here, where the checkpoint means FP8 with scales that it holds: closer, "
                "in twice the memory; --kv-cache-dtype fp8 keeps them in FP8, with scales of each token and head"
            ]
        return tuple(result)

    def renamed(self, old: str, new: str) -> "CompressedTensors":
        """Return the tensors with one renamed. raises CheckpointError if `old` is quantized: embeddings are floats"""
        if old in self._layers:
            raise CheckpointError(
                f"{old} is compressed, and stands for {new}, which is missing", f"{new} as floats", _AGAIN
            )
        infos = {new if name == old else name: info for name, info in self._infos.items()}
        parts = self._parts.renamed(old, new)
        return CompressedTensors(infos, parts, self._layers, self.kv)

    def load(self, name: str) -> Array:
        layer = self._layers.get(name)
        return super().load(name) if layer is None else self._floats(layer)

    def format(self, name: str) -> QuantisedFormat | None:
        """Return the format of the codes; None for floats, and if float16 cannot hold the scales and minimums exactly.
        Reads these."""
        if name not in self._formats:
            layer = self._layers.get(name)
            self._formats[name] = self._format(layer) if layer else None
        return self._formats[name]

    def stored(self, name: str, bits: int, group: int) -> QuantisedMatrix | None:
        stored_format = self.format(name)
        if stored_format is None or stored_format.bits > bits or stored_format.group != group:
            return None
        layer = self._layers[name]
        if stored_format.e4m3:
            own = np.ascontiguousarray(self._scales(layer)[:, :1], np.float32)
            return QuantisedMatrix(self._e4m3(layer), own, group, bits, e4m3=True)
        return integer_matrix(self._codes(layer), self._scales(layer), self._zeros(layer), stored_format, bits)

    def activation_bits(self, name: str) -> int:
        layer = self._layers.get(name)
        return 16 if layer is None or layer.scheme.float_activations else layer.scheme.activation_bits

    def meets_fp8(self, name: str) -> bool:
        layer = self._layers.get(name)
        return layer is not None and layer.scheme.float_activations and layer.scheme.per_token

    def _format(self, layer: _CompressedMatrix) -> QuantisedFormat | None:
        if layer.scheme.floats:  # float32 holds any scale
            return FP8 if layer.n_groups == 1 else None
        return integer_format(layer.scheme.bits, layer.group, self._scales(layer), self._zeros(layer))

    def _floats(self, layer: _CompressedMatrix) -> NDArray[np.float32]:
        scales, zeros = self._scales(layer), self._zeros(layer)
        result = np.empty(layer.shape, np.float32)
        codes = self._e4m3(layer).view(E4M3) if layer.scheme.floats else self._codes(layer)
        rows = max((1 << 22) // layer.shape[1], 1)
        for start in range(0, len(codes), rows):  # a few rows at a time, because they are float64
            part = slice(start, start + rows)
            part_zeros = None if zeros is None else zeros[part]
            result[part] = integer_floats(codes[part], scales[part], part_zeros, layer.group)
        return result

    def _codes(self, layer: _CompressedMatrix) -> NDArray[np.int8]:
        """Return the codes (N, K), signed or unsigned as stored."""
        if not layer.scheme.packed:
            return self._parts.load(layer.name)
        words = self._parts.load(_module(layer) + PACKED)
        return unpack(words, layer.scheme.bits, layer.shape[1])

    def _e4m3(self, layer: _CompressedMatrix) -> NDArray[np.int8]:
        """Return E4M3 bytes (N, K). raises CheckpointError if one is NaN"""
        codes = np.ascontiguousarray(self._parts.load(layer.name)).view(np.int8)
        wrong = (codes & np.int8(_E4M3_NAN)) == _E4M3_NAN
        if wrong.any():
            row, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
            raise CheckpointError(
                f"{layer.name} has {np.count_nonzero(wrong):,} FP8 codes that are no numbers, the first at "
                f"[{row}, {column}]", "E4M3 codes up to 448", _AGAIN,
            )  # fmt: skip
        return codes

    def _scales(self, layer: _CompressedMatrix) -> NDArray[np.float64]:
        """Return the scales (N, G). raises CheckpointError if one is not finite"""
        scales = self._parts.load(_module(layer) + layer.scheme.scale_suffix).astype(np.float64)
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"{_module(layer)}{layer.scheme.scale_suffix} has scales that are not finite", "numbers", _AGAIN
            )
        if layer.scheme.block_rows > 1:
            return np.repeat(scales.reshape(-1, layer.n_groups), layer.scheme.block_rows, axis=0)[: layer.shape[0]]
        return np.broadcast_to(scales.reshape(-1, layer.n_groups) if scales.size > 1 else scales.reshape(1, 1),
                               (layer.shape[0], layer.n_groups))  # fmt: skip

    def _zeros(self, layer: _CompressedMatrix) -> NDArray[np.int8] | None:
        """Return the zero points (N, G), signed like the codes; None if all are 0."""
        if layer.scheme.symmetric:
            return None
        zeros = self._parts.load(_module(layer) + ZERO)
        if layer.scheme.packed:
            return np.ascontiguousarray(unpack(zeros.T, layer.scheme.bits, layer.shape[0]).T)
        return zeros.reshape(layer.shape[0], layer.n_groups)


def _module(layer: _CompressedMatrix) -> str:
    return layer.name.removesuffix(WEIGHT)


def _compressed(parts: Tensors) -> Iterator[str]:
    """Yield the names of quantized layers."""
    for name, info in parts.items():
        if name.endswith(PACKED):
            yield name.removesuffix(PACKED)
        elif name.endswith(WEIGHT) and info.dtype in ("int8", "float8_e4m3fn"):
            yield name.removesuffix(WEIGHT)


def _own_parts(layer: _CompressedMatrix) -> tuple[str, ...]:
    values = (PACKED, SHAPE) if layer.scheme.packed else (WEIGHT,)
    zeros = () if layer.scheme.symmetric else (ZERO,)
    statics = _ALLOWED if layer.scheme.float_activations else ()
    return (*values, layer.scheme.scale_suffix, *zeros, *statics)


def _layer(parts: Tensors, module: str, scheme: Scheme) -> _CompressedMatrix:
    """Return the layer of a module after checking all its tensors. raises CheckpointError"""
    if not scheme.packed:
        stored_format = "float8_e4m3fn" if scheme.floats else "int8"
        _check(parts, module + WEIGHT, (stored_format,), None)
        layer = _CompressedMatrix(module + WEIGHT, scheme, _sizes(module, parts[module + WEIGHT].shape))
    else:
        _check(parts, module + SHAPE, ("int64",), (2,))
        shape = _sizes(module, tuple(int(n) for n in parts.load(module + SHAPE)))
        _check(parts, module + PACKED, ("int32",), (shape[0], words_of(shape[1], scheme.bits)))
        layer = _CompressedMatrix(module + WEIGHT, scheme, shape)
        if module + WEIGHT in parts:
            raise CheckpointError(f"{module} has weight and weight_packed", "one of them", _AGAIN)
    N, G = layer.shape[0], layer.n_groups
    rows = -(-N // scheme.block_rows)
    scales = [(1,), (1, 1), ()] if scheme.per_tensor else [(rows, G)] + [(rows,)] * (G == 1)
    _check(parts, module + scheme.scale_suffix, _SCALES, *scales)
    if not scheme.symmetric:
        packed = scheme.packed
        _check(parts, module + ZERO, ("int32",) if packed else ("int8",),
               (words_of(N, scheme.bits), G) if packed else (N, G))  # fmt: skip
    return layer


def _sizes(module: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or not all(0 < n < 1 << 31 for n in shape):
        raise CheckpointError(f"{module}.weight is {shape}", "a matrix (N, K)", _AGAIN)
    return shape[0], shape[1]


def _check(parts: Tensors, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...] | None) -> None:
    info = parts.get(name)
    if info is None:
        raise CheckpointError(f"the checkpoint has no tensor {name}", "all parts of a compressed layer", _AGAIN)
    if info.dtype not in dtypes or not (None in shapes or info.shape in shapes):
        expected = "" if None in shapes else f" {' or '.join(map(str, shapes))}"
        raise CheckpointError(
            f"{name} is {info.shape} {info.dtype}", f"{' or '.join(dtypes)}{expected}, by config.json", _AGAIN
        )


def _check_plain(name: str, info: TensorInfo, compression: Compression) -> None:
    """Check a tensor that belongs to no quantized layer. raises CheckpointError if config.json says otherwise"""
    if name.endswith(_UNSUPPORTED):
        raise CheckpointError(
            f"the checkpoint has {name}", "codes in the order of their inputs, with one level of scales", _AGAIN
        )
    if info.dtype not in FLOAT_NAMES or name.endswith((*SCALES, ZERO, SHAPE)):
        raise CheckpointError(f"{name} ({info.dtype}) belongs to no compressed layer", "floats beside these", _AGAIN)
    scheme = (
        compression.scheme_of(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) and len(info.shape) == 2 else None
    )
    if scheme and not name.endswith(_TABLE):
        raise CheckpointError(
            f"{name} holds {info.dtype}", f"{scheme.format}, as config.json says, or its name in ignore", _AGAIN
        )
