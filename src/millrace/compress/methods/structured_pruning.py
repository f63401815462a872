"""Structured pruning by Minitron's scores (arXiv:2407.14679): whole MLP channels and query heads go.

A channel's score is the mean of |x| of its activation, what `down_proj` reads; a head's the length of the vector of
such means over its outputs, what `o_proj` reads, ranked within the heads that share keys and values. Means are over all
tokens: the paper's L2 over samples would need each sample's own. What is left is a smaller dense model with the same
weights; the paper trains it again on billions of tokens, and that is not done here.

I channels, H query heads of D, of which each of V key and value heads serves H / V.
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

MULTIPLE = 32  # that channels are kept in: groups of quantised weights, panels of kernels
_WEIGHT, _BIAS = ".weight", ".bias"
_ROWS, _COLUMNS = 0, 1
# Of a layer, what gets smaller, and along which dimension; biases where there are some.
_MLP = (("mlp.gate_proj", _ROWS), ("mlp.up_proj", _ROWS), ("mlp.down_proj", _COLUMNS))
_HEADS = (("self_attn.q_proj", _ROWS), ("self_attn.o_proj", _COLUMNS))
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Prune:
    """As recipes have it: shares that go, of MLP channels and of query heads; 0 leaves them."""

    mlp: float = 0.0
    heads: float = 0.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is left: channels, and query heads of each key and value head."""

    channels: int
    heads: int


def sizes(config: ModelConfig, prune: Prune) -> Sizes:
    """raises ConfigError for a share that is too small to leave anything out"""
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
    """Of the tensors that get smaller, by name. raises CheckpointError where a layer has not what is pruned"""
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
    """Keys of config.json that say so."""
    return {
        "intermediate_size": left.channels, "num_attention_heads": left.heads * config.n_kv_heads,
        "head_dim": config.head_dim,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pruned:
    """Of a layer. floats: the smaller tensors; figures: of the linear layers that read less, their errors what is lost
    before anything else is, `nearest` what would be if the inputs with the largest weights stayed"""

    floats: dict[str, Array]
    figures: dict[str, LayerDiagnostics]


def pruned(
    load: Callable[[str], Array], smaller: Mapping[str, tuple[int, ...]], layer: int, statistics: CalibrationStatistics,
    config: ModelConfig, left: Sizes,
) -> Pruned:  # fmt: skip
    """smaller: as `shapes` says"""
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
    """w (N, K) with zeros in all columns but these."""
    result = np.zeros_like(w)
    result[:, indices] = w[:, indices]
    return result


def channels_kept(mean: Array, n: int) -> Indices:
    """mean (I,) of |x| -> (n,), in their order."""
    return _most(mean, n)


def heads_kept(mean: Array, config: ModelConfig, of_each: int) -> Indices:
    """mean (H D,) of |x| -> the outputs of the heads that stay, in their order."""
    V, D = config.n_kv_heads, config.head_dim
    scores = np.sqrt(np.square(mean.astype(np.float64)).reshape(V, -1, D).sum(axis=2))  # (V, H / V)
    heads = [v * scores.shape[1] + h for v, row in enumerate(scores) for h in _most(row, of_each)]
    return (np.asarray(heads)[:, None] * D + np.arange(D)).reshape(-1)


def _most(scores: Array, n: int) -> Indices:
    return np.sort(np.argsort(-scores, kind="stable")[:n])


def _parts(config: ModelConfig, left: Sizes) -> list[tuple[str, int, int]]:
    """(part of a layer, dimension, what is left of it)"""
    heads = left.heads * config.n_kv_heads
    result = [(part, d, left.channels) for part, d in _MLP if left.channels < config.intermediate_size]
    return result + [(part, d, heads * config.head_dim) for part, d in _HEADS if heads < config.n_heads]


def _too_little(key: str, share: float, of: str) -> ConfigError:
    return ConfigError(
        f"the recipe's prune.{key} of {share:g} leaves all", f"a share of {of}", "prune more, or nothing"
    )
