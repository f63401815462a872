"""Rounds a model's layers one after the other, each by a method that uses calibration statistics.

Methods combine the same parts: scale folding (AWQ, SmoothQuant), searched or clipped ranges, and rounding to nearest
or by GPTQ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.compress.calibration.statistics import CalibrationStatistics, InputStatistics
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics, figures
from millrace.compress.measure.reconstruction_error import clipped, relative_error
from millrace.compress.methods.awq_smoothquant import (
    WEIGHT,
    Awq,
    ScaleFold,
    ScalingSite,
    SmoothQuant,
    awq_factors,
    fold,
    scaled_weights,
    sites,
    smooth_factors,
)
from millrace.compress.methods.gptq import Gptq, gptq
from millrace.compress.methods.quantization_grid import Array, Floats, Grid, ScaleSearch, fitted, nearest, with_scales
from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A rounding method. At most one of search and clip is set; if neither is, ranges are not reduced."""

    grid: Grid
    smooth: Awq | SmoothQuant | None = None
    search: ScaleSearch | None = None
    clip: bool = False
    gptq: Gptq | None = None

    def __post_init__(self) -> None:
        if self.search and self.clip:
            raise ConfigError("ranges both searched and clipped", "one way to choose them", "leave one out")


Methods = Callable[[str], Method | None]  # of a linear layer's name


@dataclass(frozen=True, slots=True)
class Rounding:
    """A rounded matrix. error: share of the output's energy that is lost; damping: GPTQ's"""

    matrix: QuantisedMatrix
    error: float
    damping: float | None = None


@dataclass(slots=True)
class RoundedLayer:
    """A rounded decoder layer. matrices, figures: by linear layer; floats: other changed tensors, by name"""

    name: str
    matrices: dict[str, Rounding] = field(default_factory=dict)
    floats: dict[str, Floats] = field(default_factory=dict)
    folds: list[ScaleFold] = field(default_factory=list)
    figures: dict[str, LayerDiagnostics] = field(default_factory=dict)


def rounded_layers(
    load: Callable[[str], Array], shapes: Mapping[str, Sequence[int]], statistics: CalibrationStatistics,
    methods: Methods,
    head_dim: int, offset: float = 0.0,
) -> Iterator[RoundedLayer]:  # fmt: skip
    """Round every layer of the statistics in turn; memory holds one. load: returns a tensor by name

    methods: by linear layer; None leaves a layer and its scales unchanged
    head_dim: of attention; offset: added by the model to the weights of its norms. raises CheckpointError, ConfigError
    """
    by_layer: dict[str, list[str]] = {}
    for linear in statistics:
        by_layer.setdefault(linear.rsplit(".", 2)[0], []).append(linear)
    for name, linears in by_layer.items():
        yield _rounded_layer(name, linears, load, shapes, statistics, methods, (head_dim, offset))


def _rounded_layer(
    name: str, linears: list[str], load: Callable[[str], Array], shapes: Mapping[str, Sequence[int]],
    statistics: CalibrationStatistics, methods: Methods, model: tuple[int, float],
) -> RoundedLayer:  # fmt: skip
    head_dim, offset = model
    chosen = {linear: method for linear in linears if (method := methods(linear))}
    if not chosen:
        return RoundedLayer(name)
    tensors = {n: np.asarray(load(n), np.float32) for n in shapes if n.startswith(f"{name}.")}
    arrays, result = dict(tensors), RoundedLayer(name)
    inputs: dict[str, InputStatistics] = {}
    for linear in chosen:
        shared = next((inputs[other] for other in inputs if linear in inputs[other].linears), None)
        inputs[linear] = shared or statistics[linear]
        result.figures[linear] = before(tensors[linear + WEIGHT], inputs[linear], chosen[linear])
    rounded: dict[str, Rounding] = {}  # already rounded while choosing scales for a site
    for site in sites(shapes, name, head_dim):
        if not _moves(site, chosen):
            continue
        first = site.linears[0]
        factors = _factors([arrays[n + WEIGHT] for n in site.linears], site, inputs[first], chosen[first])
        if factors is None:
            continue
        folded = dict(arrays)
        moved = fold(folded, site, factors, offset if site.is_norm else 0.0)
        scaled = dict.fromkeys(site.linears, scaled_weights(inputs[first], moved.factors))
        if isinstance(chosen[first].smooth, Awq) and chosen[first].clip:
            better, moves = _better(site, chosen, (folded, scaled), (arrays, inputs))
            rounded |= better
            if not moves:
                continue
        arrays, inputs = folded, inputs | scaled
        rounded.pop(site.source, None)  # its rows have changed
        result.folds.append(moved)
    for linear, method in chosen.items():
        w = arrays.pop(linear + WEIGHT)
        one = result.matrices[linear] = rounded.get(linear) or rounding(w, inputs[linear], method)
        result.figures[linear] = replace(result.figures[linear], error=one.error, moved=_ema(result.folds, linear))
    result.floats = {n: array for n, array in arrays.items() if array is not tensors[n]}
    return result


def rounding(w: Array, x: InputStatistics, method: Method) -> Rounding:
    """Round a matrix w (N, K) with input x."""
    grid = method.grid
    if method.clip:
        scales = clipped(w, x.gram, grid, per_row=not method.gptq)  # GPTQ itself compensates for other groups
    elif method.gptq and not method.gptq.order and not method.search:
        scales = None
    else:
        scales = fitted(w, grid, method.search, x.gram.diagonal())
    if method.gptq:
        roundings = gptq(w, x.gram, grid, method.gptq, method.search, scales)
        return Rounding(roundings.matrix, relative_error(w, roundings.matrix.dequantise(), x.gram), roundings.damping)
    assert scales is not None
    nearest = with_scales(w, scales, grid)
    return Rounding(nearest, relative_error(w, nearest.dequantise(), x.gram))


def before(w: Array, x: InputStatistics, method: Method) -> LayerDiagnostics:
    """Return the diagnostics of an original matrix, for now with the error of rounding to nearest."""
    error = relative_error(w, nearest(w, fitted(w, method.grid), method.grid), x.gram)
    plain = method == Method(grid=method.grid)
    return figures(w, method.grid.group, error, x, nearest=None if plain else error)


def _ema(folds: Sequence[ScaleFold], linear: str) -> float | None:
    factors = next((one.factors for one in folds if linear in one.site.linears), None)
    return None if factors is None else float(factors.max() / factors.min())


def _moves(site: ScalingSite, chosen: Mapping[str, Method]) -> bool:
    """Whether to fold scales at a site: all its layers are rounded, and its readers use the same method."""
    if not all(name in chosen for name in (*site.linears, *(() if site.is_norm else (site.source,)))):
        return False
    smoothing = {chosen[name].smooth for name in site.linears}
    return len(smoothing) == 1 and smoothing != {None}


def _factors(weights: Sequence[Array], site: ScalingSite, x: InputStatistics, method: Method) -> Floats | None:
    match method.smooth:
        case Awq() as awq:
            return awq_factors(weights, site, x, method.grid, awq)
        case SmoothQuant() as smooth if site.is_norm or smooth.linears:
            return smooth_factors(weights, site, x, smooth)
    return None


_State = tuple[Mapping[str, Array], Mapping[str, InputStatistics]]  # tensors; inputs of linear layers


def _better(
    site: ScalingSite, chosen: Mapping[str, Method], moved: _State, as_given: _State
) -> tuple[dict[str, Rounding], bool]:
    """Whether folding scales reduces the error of the site's outputs, rounded to nearest within clipped ranges.

    AWQ finds scales with unclipped ranges; with clipped ones the unscaled weights may be better. Also returns the
    roundings of the better choice that the layers' methods can reuse.
    """
    both = [
        {n: rounding(arrays[n + WEIGHT], inputs[n], Method(grid=chosen[n].grid, clip=True)) for n in site.linears}
        for arrays, inputs in (moved, as_given)
    ]
    lost = [sum(one.error for one in each.values()) for each in both]
    moves = lost[0] < lost[1]
    better = both[0] if moves else both[1]
    return {n: one for n, one in better.items() if chosen[n].clip and not chosen[n].gptq}, moves
