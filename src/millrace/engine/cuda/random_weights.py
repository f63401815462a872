"""Random weights, drawn on the device: for measurements, which depend on shapes and formats only.

They are normally distributed with a spread that preserves the size of rows, and quantized like real ones: with zeros a
GPU draws less power, and so runs faster. Norms, biases and tables are the graph's own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from millrace.engine.cuda.device_constants import Loaded, load, load_merged
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.graph.types import Node, Value
from millrace.kernels.matmul.coded import E4M3, LARGEST, QuantizedRows
from millrace.kernels.matmul.op import PRODUCTS, group_of, matrices_of, matrix_size, precision_of

AT_ONCE = 1 << 26  # elements drawn at once, as float32


def random_loaded(lowered: LoweredGraph, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Loaded:
    """Return constants as `load` does, without reading any matrix."""
    graph = lowered.graph
    generator = torch.Generator(device).manual_seed(seed)
    coded: dict[Node, tuple[QuantizedRows, ...]] = {
        node: (_coded(_sizes(node), node, generator),) for node in lowered.placement.coded
    }
    weights: dict[Value, Tensor] = {}
    joined = load_merged(graph, weights, coded, dtype, device)
    floats = [w for n in graph.nodes if n.op in PRODUCTS and n not in coded for w in matrices_of(n)]
    floats += [n.inputs[1] for n in graph.nodes if n.op == "embedding"]
    for w in dict.fromkeys(floats):
        if w not in weights:
            weights[w] = torch.empty(matrix_size(w), dtype=dtype, device=device)
        for part in _parts(weights[w]):
            part.copy_(_normal(part, generator))
    return load(lowered, dtype, device, Loaded(weights, coded, joined))


def _sizes(node: Node) -> tuple[int, int]:
    """Return the size of all its matrices together."""
    sizes = [matrix_size(w) for w in matrices_of(node)]
    return sum(n for n, _ in sizes), sizes[0][1]


def _coded(sizes: tuple[int, int], node: Node, generator: torch.Generator) -> QuantizedRows:
    """Draw codes: E4M3 with a scale per row, INT8 or INT4 with float16 scales per group."""
    (rows, width), device = sizes, generator.device
    group, bits = group_of(node), precision_of(node).bits
    if not group:
        codes, scales = torch.empty(sizes, dtype=E4M3, device=device), torch.empty((rows, 1), device=device)
        for part, scale in zip(_parts(codes), _parts(scales, width), strict=True):
            w = _normal(part, generator)
            scale.copy_(w.abs().amax(1, keepdim=True) / LARGEST)
            part.copy_(w / scale)
        return QuantizedRows(codes, scales, width, width)
    most = 2 ** (bits - 1) - 1
    halves = bits == 4
    stored = (rows, -(-width // 2)) if halves else sizes
    codes = torch.empty(stored, dtype=torch.uint8 if halves else torch.int8, device=device)
    scales = torch.empty((rows, -(-width // group)), dtype=torch.float16, device=device)
    for part, scale in zip(_parts(codes, width), _parts(scales, width), strict=True):
        w = torch.nn.functional.pad(_normal(part, generator, width), (0, -width % group)).unflatten(1, (-1, group))
        scale.copy_(w.abs().amax(2) / most)
        quantized = (w / scale.float()[..., None]).round().clamp(-most, most).flatten(1)[:, :width]
        part.copy_(_in_halves(quantized) if halves else quantized)
    return QuantizedRows(codes, scales, width, group, zero=8 if halves else 0)


def _in_halves(codes: Tensor) -> Tensor:
    """Pack codes (R, K) from -7 to 7 as (R, ceil(K / 2)), in QuantizedRows' order."""
    even = torch.nn.functional.pad(codes + 8, (0, codes.shape[1] % 2)).to(torch.uint8)
    return even[:, ::2] | even[:, 1::2] << 4


def _normal(like: Tensor, generator: torch.Generator, width: int = 0) -> Tensor:
    """Draw a normal tensor like `like`. width: of its rows, if the stored width differs"""
    width = width or like.shape[1]
    return torch.randn((len(like), width), generator=generator, device=generator.device) / width**0.5


def _parts(x: Tensor, width: int = 0) -> Iterator[Tensor]:
    """Yield views of some rows each, so that the random numbers fit beside the result."""
    return iter(x.split(max(1, AT_ONCE // (width or x.shape[1]))))
