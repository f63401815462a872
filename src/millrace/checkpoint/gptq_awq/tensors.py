"""Tensors of a GPTQ or AWQ folder, by the names of the layers they belong to.

A layer `q_proj` is stored as several tensors; here it is `q_proj.weight` (N, K), like in other checkpoints. G groups of
inputs have a scale and a zero point each, and words hold 32 / bits codes:

    gptq   qweight int32 (words of K, N), qzeros int32 (G, words of N), scales (G, N), g_idx int32 (K)
    gemm   qweight int32 (K, words of N), qzeros int32 (G, words of N), scales (G, N)
    gemv   qweight int32 (N, words of K), qzeros int32 (N, words of G, padded), scales (N, G, padded)
    w = (code - zero) * scale

g_idx is the group of each input. GPTQ's `desc_act` assigns inputs to groups in another order than they have; the engine
needs neighbours, so such a matrix is read as floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.compressed.packing import words_of
from millrace.checkpoint.gptq_awq.packing import in_awq_order, unpack
from millrace.checkpoint.gptq_awq.scheme import GEMM, GEMV, GPTQ, PackedScheme
from millrace.checkpoint.weights.integer_matrix import group_size, integer_floats, integer_format, integer_matrix
from millrace.checkpoint.weights.quantized_matrix import QuantisedFormat, QuantisedMatrix
from millrace.checkpoint.weights.safetensors import FLOAT_NAMES, Array, TensorInfo, Tensors
from millrace.errors import CheckpointError

WEIGHT, CODES, ZEROS, SCALES, GROUPS = ".weight", ".qweight", ".qzeros", ".scales", ".g_idx"
NAMES = {"I32": "int32"}  # in addition to floating-point types
_AGAIN = "download or copy the checkpoint again, or compress the original one with `millrace compress`"
_ROWS = 1 << 22  # numbers that are converted to float64 at a time


@dataclass(frozen=True, slots=True)
class _QuantizedMatrix:
    """One quantized matrix (N, K).

    group: for whole rows the length rounded up to a multiple of 4, as kernels require
    """

    module: str
    scheme: PackedScheme
    shape: tuple[int, int]

    @property
    def group(self) -> int:
        return group_size(self.scheme.group, self.shape[1])

    @property
    def n_groups(self) -> int:
        return -(-self.shape[1] // self.group)


class PackedTensors(Tensors):
    """Tensors of such a folder: `load` returns floats, exact within float32; `stored` returns the checkpoint's own
    codes."""

    def __init__(self, infos: dict[str, TensorInfo], parts: Tensors, layers: Mapping[str, _QuantizedMatrix]) -> None:
        super().__init__(infos, parts.states)
        self._parts, self._layers = parts, dict(layers)
        self._formats: dict[str, QuantisedFormat | None] = {}
        self._group_of_input: dict[str, NDArray[np.int32] | None] = {}

    @classmethod
    def from_folder(cls, folder: Path, scheme: PackedScheme) -> "PackedTensors":
        """Open a folder; reads headers alone. raises CheckpointError"""
        parts = Tensors.open(folder, NAMES)
        infos: dict[str, TensorInfo] = {}
        layers: dict[str, _QuantizedMatrix] = {}
        used: set[str] = set()
        for module in [name.removesuffix(CODES) for name in parts if name.endswith(CODES)]:
            layer, name = _layer(parts, module, scheme), module + WEIGHT
            if name in parts:
                raise CheckpointError(f"{module} has weight and qweight", "one of them", _AGAIN)
            own = [module + suffix for suffix in (CODES, ZEROS, SCALES, GROUPS) if module + suffix in parts]
            used.update(own)
            first, size = parts[module + CODES], sum(parts[part].nbytes for part in own)
            infos[name] = TensorInfo(name, layer.shape, f"int{scheme.bits}", first.file, size, first.offset)
            layers[name] = layer
        for name, info in parts.items():
            if name in used:
                continue
            if info.dtype not in FLOAT_NAMES or name.endswith((ZEROS, SCALES, GROUPS)):
                raise CheckpointError(
                    f"{name} ({info.dtype}) belongs to no quantized layer", "qweight beside it", _AGAIN
                )
            infos[name] = info
        if not layers:
            raise CheckpointError(
                f"{folder} has no quantized layer, and config.json says {scheme.bits} bits", "qweight tensors", _AGAIN
            )
        return cls(infos, parts, layers)

    @property
    def notes(self) -> tuple[str, ...]:
        rounded = [layer.module for layer in self._layers.values() if self._groups(layer) is not None]
        if not rounded:
            return self._parts.notes
        return (
            *self._parts.notes,
            f"{len(rounded)} matrices run as bfloat16 by default, not as the integers that are stored, because their "
            f"inputs are not in the order of their groups (desc_act): {rounded[0]}, ...",
        )

    def renamed(self, old: str, new: str) -> "PackedTensors":
        """Return the tensors with one renamed. raises CheckpointError if `old` is quantized: embeddings are floats"""
        if old in self._layers:
            raise CheckpointError(
                f"{old} is quantized, and stands for {new}, which is missing", f"{new} as floats", _AGAIN
            )
        infos = {new if name == old else name: info for name, info in self._infos.items()}
        return PackedTensors(infos, self._parts.renamed(old, new), self._layers)

    def load(self, name: str) -> Array:
        layer = self._layers.get(name)
        return super().load(name) if layer is None else self._floats(layer)

    def format(self, name: str) -> QuantisedFormat | None:
        """Return the format of the codes; None for floats, and if no format of the engine holds the matrix exactly.
        Reads scales and zero points."""
        if name not in self._formats:
            layer = self._layers.get(name)
            self._formats[name] = None if layer is None or self._groups(layer) is not None else self._format(layer)
        return self._formats[name]

    def stored(self, name: str, bits: int, group: int) -> QuantisedMatrix | None:
        stored_format = self.format(name)
        if stored_format is None or stored_format.bits > bits or stored_format.group != group:
            return None
        layer = self._layers[name]
        return integer_matrix(self._codes(layer), self._scales(layer), self._zeros(layer), stored_format, bits)

    def _format(self, layer: _QuantizedMatrix) -> QuantisedFormat | None:
        return integer_format(layer.scheme.bits, layer.group, self._scales(layer), self._zeros(layer))

    def _floats(self, layer: _QuantizedMatrix) -> NDArray[np.float32]:
        codes, scales = self._codes(layer), self._scales(layer)
        zeros, groups = self._zeros(layer), self._groups(layer)
        result = np.empty(layer.shape, np.float32)
        rows = max(_ROWS // layer.shape[1], 1)
        for start in range(0, len(codes), rows):
            part = slice(start, start + rows)
            if groups is None:
                part_zeros = None if zeros is None else zeros[part]
                result[part] = integer_floats(codes[part], scales[part], part_zeros, layer.group)
            else:
                wide = codes[part].astype(np.float64)
                if zeros is not None:
                    wide -= zeros[part][:, groups]
                result[part] = wide * scales[part][:, groups]
        return result

    def _codes(self, layer: _QuantizedMatrix) -> NDArray[np.int8]:
        """Return signed codes (N, K)."""
        words, scheme, (N, K) = self._parts.load(layer.module + CODES), layer.scheme, layer.shape
        if scheme.layout == GPTQ:
            codes = unpack(words, scheme.bits, K).T
        elif scheme.layout == GEMM:
            codes = in_awq_order(unpack(np.ascontiguousarray(words.T), scheme.bits, N))
        else:
            codes = unpack(np.ascontiguousarray(words.T), scheme.bits, K).T
        return _signed(codes, scheme.bits)

    def _scales(self, layer: _QuantizedMatrix) -> NDArray[np.float64]:
        """Return the scales (N, G). raises CheckpointError if one is not finite"""
        scales = self._parts.load(layer.module + SCALES).astype(np.float64)
        scales = scales[:, : layer.n_groups] if layer.scheme.layout == GEMV else scales.T
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{layer.module}{SCALES} has scales that are not finite", "numbers", _AGAIN)
        return np.ascontiguousarray(scales)

    def _zeros(self, layer: _QuantizedMatrix) -> NDArray[np.int8] | None:
        """Return the zero points (N, G), signed like the codes; None if all are 0, as of a symmetric matrix."""
        words, scheme, N = self._parts.load(layer.module + ZEROS), layer.scheme, layer.shape[0]
        along = np.ascontiguousarray(words.T)
        if scheme.layout == GEMV:
            zeros = unpack(along, scheme.bits, layer.n_groups).T
        else:
            zeros = unpack(along, scheme.bits, N)
            zeros = in_awq_order(zeros) if scheme.layout == GEMM else zeros
        # modulo 2^bits: 0 is stored as the highest code
        unsigned = (zeros + np.uint8(scheme.zero_offset)) & np.uint8((1 << scheme.bits) - 1)
        signed = _signed(unsigned, scheme.bits)
        return signed if signed.any() else None

    def _groups(self, layer: _QuantizedMatrix) -> NDArray[np.int32] | None:
        """Return the group of each input (K), or None if they are in order. raises CheckpointError if one is none"""
        name = layer.module + GROUPS
        if name not in self._parts:
            return None
        if name not in self._group_of_input:
            groups = self._parts.load(name)
            if ((groups < 0) | (groups >= layer.n_groups)).any():
                raise CheckpointError(f"{name} has groups beyond {layer.n_groups}", "a group of each input", _AGAIN)
            is_ordered = np.array_equal(groups, np.arange(layer.shape[1]) // layer.group)
            self._group_of_input[name] = None if is_ordered else groups
        return self._group_of_input[name]


def _signed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Return unsigned codes minus 2^(bits-1); 8 bits wrap around to the right value."""
    return np.subtract(codes, np.uint8(1 << bits - 1), order="C").view(np.int8)


def _layer(parts: Tensors, module: str, scheme: PackedScheme) -> _QuantizedMatrix:
    """Return the layer of a module after checking all its tensors. raises CheckpointError"""
    words = _matrix(parts, module + CODES, ("int32",))
    scales = _matrix(parts, module + SCALES, FLOAT_NAMES)
    zeros = _matrix(parts, module + ZEROS, ("int32",))
    per_word = 32 / scheme.bits
    if scheme.layout == GPTQ:
        K, N = round(words[0] * per_word), words[1]
        expected = {CODES: (words_of(K, scheme.bits), N)}
    elif scheme.layout == GEMM:
        K, N = words[0], round(words[1] * per_word)
        expected = {CODES: (K, words_of(N, scheme.bits))}
    else:
        K, N = round(words[1] * per_word), words[0]
        expected = {CODES: (N, words_of(K, scheme.bits))}
    layer = _QuantizedMatrix(module, scheme, (N, K))
    if scheme.layout == GEMV:
        padded = zeros[1] * 8
        if padded < layer.n_groups or padded > 64 * layer.n_groups + 64:
            raise _wrong_shape(module + ZEROS, zeros, (N, words_of(layer.n_groups, scheme.bits)))
        expected |= {ZEROS: (N, zeros[1]), SCALES: (N, padded)}
    else:
        expected |= {ZEROS: (layer.n_groups, words_of(N, scheme.bits)), SCALES: (layer.n_groups, N)}
    for suffix, shape in ((CODES, words), (ZEROS, zeros), (SCALES, scales)):
        if shape != expected[suffix]:
            raise _wrong_shape(module + suffix, shape, expected[suffix])
    if scheme.layout == GPTQ and module + GROUPS in parts:
        info = parts[module + GROUPS]
        if info.dtype != "int32" or info.shape != (K,):
            raise CheckpointError(f"{info.name} is {info.shape} {info.dtype}", f"int32 {(K,)}, by qweight", _AGAIN)
    return layer


def _matrix(parts: Tensors, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """Return the shape of a tensor. raises CheckpointError unless it is a matrix of one of these types"""
    info = parts.get(name)
    if info is None:
        raise CheckpointError(f"the checkpoint has no tensor {name}", "all parts of a quantized layer", _AGAIN)
    if info.dtype not in dtypes or len(info.shape) != 2 or not all(0 < n < 1 << 31 for n in info.shape):
        raise CheckpointError(f"{name} is {info.shape} {info.dtype}", f"a matrix of {' or '.join(dtypes)}", _AGAIN)
    return info.shape[0], info.shape[1]


def _wrong_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{name} is {shape}", f"{expected}, by config.json and the layer's other tensors", _AGAIN)
