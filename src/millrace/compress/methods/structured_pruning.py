"""Structured pruning by Minitron's scores (arXiv:2407.14679): removes whole MLP channels and query heads.

A channel's score is the mean |x| of its activation, the input of `down_proj`. A head's score is the norm of the vector
of such means over its outputs, the input of `o_proj`; heads are ranked among those that share keys and values. Means
are over all tokens: the paper's L2 over samples would need statistics per sample. The result is a smaller dense model
with the same weights; the paper retrains it on billions of tokens, which is not done here.

I channels, H query heads of dimension D, V key/value heads with H / V query heads each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics, figures
from millrace.compress.measure.reconstruction_error import relative_error
from millrace.compress.methods.quantization_grid import Array
from millrace.errors import CheckpointError, ConfigError

MULTIPLE = 32  # of the number of channels kept, for groups of quantized weights and kernel panels
_WEIGHT, _BIAS = ".weight", ".bias"
_ROWS, _COLUMNS = 0, 1
# The tensors of a layer that shrink, and along which dimension; biases if they exist.
_MLP = (("mlp.gate_proj", _ROWS), ("mlp.up_proj", _ROWS), ("mlp.down_proj", _COLUMNS))
_HEADS = (("self_attn.q_proj", _ROWS), ("self_attn.o_proj", _COLUMNS))
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Prune:
    """A recipe's prune table: the shares of MLP channels and of query heads to remove; 0 removes none."""

    mlp: float = 0.0
    heads: float = 0.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The remaining sizes: channels, and query heads per key/value head."""

    channels: int
    heads: int


def sizes(config: ModelConfig, prune: Prune) -> Sizes:
    """Return the remaining sizes. raises ConfigError if a share is too small to remove anything"""
    channels, of_each = config.intermediate_size, config.n_heads // config.n_kv_heads
    n_channels, heads = channels, of_each
    if prune.mlp:
        n_channels = max(MULTIPLE, round((1 - prune.mlp) * channels / MULTIPLE) * MULTIPLE)
        if n_channels >= channels:
            raise _too_little("mlp", prune.mlp, f"{channels:,} channels, which go in multiples of {MULTIPLE}")
    if prune.heads:
        heads = max(1, round((1 - prune.heads) * of_each))
        if heads >= of_each:
            raise _too_little("heads", prune.heads, f"{of_each} query heads for each key and value head")
    return Sizes(n_channels, heads)


def shapes(tensors: Mapping[str, tuple[int, ...]], config: ModelConfig, left: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the new shapes of tensors that shrink, by name. raises CheckpointError if a layer lacks one of them"""
    result: dict[str, tuple[int, ...]] = {}
    for part, dimension, n in _parts(config, left):
        for layer in range(config.n_layers):
            name = f"model.layers.{layer}.{part}"
            if name + _WEIGHT not in tensors:
                raise CheckpointError(f"the checkpoint has no {name}", "a decoder with it", "leave prune out")
            N, K = tensors[name + _WEIGHT]
            result[name + _WEIGHT] = (n, K) if dimension == _ROWS else (N, n)
            if dimension == _ROWS and name + _BIAS in tensors:
                result[name + _BIAS] = (n,)
    return result


def config_of(config: ModelConfig, left: Sizes) -> dict[str, object]:
    """Return the keys of config.json for the new sizes."""
    return {
        "intermediate_size": left.channels, "num_attention_heads": left.heads * config.n_kv_heads,
        "head_dim": config.head_dim,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pruned:
    """A pruned layer. floats: the smaller tensors; figures: diagnostics of the linear layers with fewer inputs.

    Their errors are those of pruning only; `nearest` is the error if the inputs with the largest weights were kept.
    """

    floats: dict[str, Array]
    figures: dict[str, LayerDiagnostics]


def pruned(
    load: Callable[[str], Array], smaller: Mapping[str, tuple[int, ...]], layer: int, statistics: CalibrationStatistics,
    config: ModelConfig, left: Sizes,
) -> Pruned:  # fmt: skip
    """Yield pruned layers. smaller: the result of `shapes`"""
    result = Pruned({}, {})
    prefix = f"model.layers.{layer}."
    for parts in (_MLP, _HEADS):
        reader = prefix + parts[-1][0]
        if reader + _WEIGHT not in smaller:
            continue
        x = statistics[reader]
        indices = channels_kept(x.mean, left.channels) if parts is _MLP else heads_kept(x.mean, config, left.heads)
        for part, dimension in parts:
            for tensor in (prefix + part + _WEIGHT, prefix + part + _BIAS):
                if tensor in smaller:
                    result.floats[tensor] = np.take(load(tensor), indices, axis=dimension)
        w = np.asarray(load(reader + _WEIGHT), np.float32)
        sizes_ = np.linalg.norm(w, axis=0)
        largest = channels_kept(sizes_, left.channels) if parts is _MLP else heads_kept(sizes_, config, left.heads)
        error, plain = (relative_error(w, _without(w, some), x.gram) for some in (indices, largest))
        result.figures[reader] = figures(w, 0, error, x, nearest=plain, plain="keeping those with the largest weights")
    return result


def _without(w: Array, indices: Indices) -> Array:
    """Return w (N, K) with zeros in all columns except `indices`."""
    result = np.zeros_like(w)
    result[:, indices] = w[:, indices]
    return result


def channels_kept(mean: Array, n: int) -> Indices:
    """Return the n channels to keep, in order. mean: of |x|, (I,)"""
    return _largest(mean, n)


def heads_kept(mean: Array, config: ModelConfig, of_each: int) -> Indices:
    """Return the outputs of the heads to keep, in order. mean: of |x|, (H D,)"""
    V, D = config.n_kv_heads, config.head_dim
    scores = np.sqrt(np.square(mean.astype(np.float64)).reshape(V, -1, D).sum(axis=2))  # (V, H / V)
    heads = [v * scores.shape[1] + h for v, row in enumerate(scores) for h in _largest(row, of_each)]
    return (np.asarray(heads)[:, None] * D + np.arange(D)).reshape(-1)


def _largest(scores: Array, n: int) -> Indices:
    return np.sort(np.argsort(-scores, kind="stable")[:n])


def _parts(config: ModelConfig, left: Sizes) -> list[tuple[str, int, int]]:
    """Return (part of a layer, dimension, remaining size)."""
    heads = left.heads * config.n_kv_heads
    result = [(part, d, left.channels) for part, d in _MLP if left.channels < config.intermediate_size]
    return result + [(part, d, heads * config.head_dim) for part, d in _HEADS if heads < config.n_heads]


def _too_little(key: str, share: float, quantity: str) -> ConfigError:
    return ConfigError(
        f"the recipe's prune.{key} of {share:g} leaves all", f"a share of {quantity}", "prune more, or nothing"
    )
