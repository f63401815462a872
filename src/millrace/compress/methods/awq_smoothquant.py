"""Scale folding (AWQ, SmoothQuant): the input x / s and the weights W * s give the same output.

AWQ (arXiv:2306.00978) chooses s to minimize the error of rounding W * s, SmoothQuant (arXiv:2211.10438) to make x / s
easy to round. The producer of the input absorbs 1 / s: a norm's weight, or rows of the previous layer. K is the number
of inputs.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from millrace.compress.calibration.statistics import InputStatistics
from millrace.compress.measure.reconstruction_error import output_error
from millrace.compress.methods.quantization_grid import Array, Floats, Grid, fitted, grouped, nearest, runs
from millrace.errors import ConfigError

# Sites of a decoder layer: the linear layers that read an input, and its source (the first name that the model has).
_NORMS = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("input_layernorm",)),
    (("mlp.gate_proj", "mlp.up_proj"), ("pre_feedforward_layernorm", "post_attention_layernorm")),
)
_LINEARS = (("self_attn.o_proj", "self_attn.v_proj"), ("mlp.down_proj", "mlp.up_proj"))
WEIGHT, BIAS = ".weight", ".bias"
Arrays = MutableMapping[str, Array]


@dataclass(frozen=True, slots=True)
class ScalingSite:
    """A scaling site. linears: readers of the input; source: the norm or layer that produces it; both without ".weight"

    shared: how often a row of the source is read, as a value head by several query heads; head: contiguous rows of it
    """

    linears: tuple[str, ...]
    source: str
    is_norm: bool
    shared: int = 1
    head: int = 1

    def base(self, of_inputs: Array) -> Array:
        """(K,) -> (K / shared,): the mean over the inputs that come from the same row of the source."""
        K = len(of_inputs)
        result: Array = of_inputs.reshape(K // (self.shared * self.head), self.shared, self.head).mean(axis=1)
        return result.reshape(-1)

    def spread(self, of_rows: Array) -> Array:
        """(K / shared,) -> (K,): the inverse of `base`, each row's value for all its inputs."""
        runs_ = of_rows.reshape(-1, 1, self.head)
        return np.ascontiguousarray(np.broadcast_to(runs_, (len(runs_), self.shared, self.head))).reshape(-1)


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """A folded scale, for the record. factors: multiply the columns of the linears, (K,)"""

    site: ScalingSite
    factors: Floats


@dataclass(frozen=True, slots=True)
class Awq:
    """s = mean^r / weight^(1-r), with the ratio r in `ratios` that minimizes the error of the layers' outputs.

    No scale is tried, too (None). weight: the mean over rows of |w| relative to its group's largest; with duo False,
    s = mean^r
    """

    ratios: tuple[float, ...] = tuple(i / 20 for i in range(20))
    duo: bool = True

    def __post_init__(self) -> None:
        if not self.ratios or not all(0 <= r <= 1 for r in self.ratios):
            raise ConfigError(f"AWQ's ratios are {self.ratios}"[:200], "some of 0 to 1", "correct them")


@dataclass(frozen=True, slots=True)
class SmoothQuant:
    """s = size(x)^alpha / size(w)^(1 - alpha), within `bounds`; linears: also if a linear layer produces the input

    rms: sizes are root mean squares, of w relative to each layer's output; False: maxima, as in the paper
    """

    alpha: float = 0.5
    bounds: tuple[float, float] = (1e-5, 1e5)
    linears: bool = False
    rms: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"SmoothQuant with alpha {self.alpha}", "0 to 1", "choose another, such as 0.8")


AUTOAWQ = Awq()


def sites(shapes: Mapping[str, Sequence[int]], layer: str, head_dim: int) -> list[ScalingSite]:
    """Return AutoAWQ's scaling sites in a decoder layer ("model.layers.0").

    With grouped queries an output projection has the same scales for all heads that share a value head.
    shapes: of all tensors
    """
    result = []
    for linears, norms in _NORMS:
        norm = next((n for n in norms if f"{layer}.{n}{WEIGHT}" in shapes), None)
        if norm and all(f"{layer}.{name}{WEIGHT}" in shapes for name in linears):
            result.append(ScalingSite(tuple(f"{layer}.{name}" for name in linears), f"{layer}.{norm}", is_norm=True))
    for linear, source in _LINEARS:
        reads, gives = (f"{layer}.{name}{WEIGHT}" for name in (linear, source))
        if reads in shapes and gives in shapes:
            shared, rest = divmod(shapes[reads][1], shapes[gives][0])
            if not rest:
                head = head_dim if shared > 1 else 1
                result.append(ScalingSite((f"{layer}.{linear}",), f"{layer}.{source}", False, shared, head))
    return result


def awq_factors(
    weights: Sequence[Array], site: ScalingSite, x: InputStatistics, grid: Grid, settings: Awq = AUTOAWQ
) -> Floats | None:
    """Return AWQ's factors (K,), or None if no scaling is better. weights: (N, K) each, of the site's linears

    As in Model Optimizer's awq_lite, the loss is the error of each layer's own output relative to its energy, so that
    none of q, k and v dominates.
    """
    stacked = np.concatenate([w.astype(np.float32, copy=False) for w in weights])
    mean = np.maximum(site.base(x.mean), 1e-12)
    relative = site.base(_relative(stacked, grid)) if settings.duo else np.ones_like(mean)
    ends = np.cumsum([len(w) for w in weights])[:-1]
    energy = [max(output_error(w, x.gram), 1e-30) for w in np.split(stacked, ends)]

    def loss(off: Floats) -> float:
        return sum(output_error(part, x.gram) / own for part, own in zip(np.split(off, ends), energy, strict=True))

    best, least = None, loss(nearest(stacked, fitted(stacked, grid), grid) - stacked)
    for ratio in settings.ratios:
        base = mean**ratio / np.maximum(relative, 1e-12) ** ((1 - ratio) if settings.duo else 0)
        factors = site.spread(_normalised(base)).astype(np.float32)
        scaled = stacked * factors
        off = (nearest(scaled, fitted(scaled, grid), grid) - scaled) / factors
        error = loss(off)
        if error < least:
            best, least = factors, error
    return best


def smooth_factors(weights: Sequence[Array], site: ScalingSite, x: InputStatistics, settings: SmoothQuant) -> Floats:
    """Return SmoothQuant's factors (K,), from the weights of all linears of the site."""
    of_inputs, of_weights = (_mean_sizes if settings.rms else _largest)(weights, site, x)
    is_nonzero = (of_inputs > 0) & (of_weights > 0)
    base = np.ones_like(of_inputs)
    if is_nonzero.any():
        result = of_inputs[is_nonzero] ** settings.alpha / of_weights[is_nonzero] ** (1 - settings.alpha)
        base[is_nonzero] = _normalised(result) if settings.rms else result  # shares of outputs have no absolute scale
    return site.spread(base.clip(*settings.bounds)).astype(np.float32)


def _largest(weights: Sequence[Array], site: ScalingSite, x: InputStatistics) -> tuple[Array, Array]:
    """Return the largest values of inputs and of weights, (K / shared,) each."""
    largest = np.max([np.abs(w).max(axis=0) for w in weights], axis=0)
    of_inputs, of_weights = (
        v.reshape(-1, site.shared, site.head).max(axis=1).reshape(-1) for v in (x.amax.astype(np.float64), largest)
    )
    return of_inputs, of_weights


def _mean_sizes(weights: Sequence[Array], site: ScalingSite, x: InputStatistics) -> tuple[Array, Array]:
    """Return root mean squares of inputs, and of weights relative to their outputs' energy.

    Each token has its own scale, max(x / s) / 127, so the error of a layer is about mean(max (x / s)^2) times
    sum (s |w|)^2 over inputs. With a sum in place of the maximum, the minimum is at s^2 = rms(x) / |w|, i.e. alpha 0.5.
    Maxima over all tokens would describe the rarest token, which has its own scale.
    """
    squares = sum(np.square(w, dtype=np.float64).sum(axis=0) / max(output_error(w, x.gram), 1e-30) for w in weights)
    return np.sqrt(site.base(x.gram.diagonal().astype(np.float64))), np.sqrt(site.base(np.asarray(squares)))


def fold(arrays: Arrays, site: ScalingSite, factors: Floats, offset: float = 0.0) -> ScaleFold:
    """Apply factors: multiply the columns of the linears, divide the source's output. arrays: by tensor

    offset: added by the model to a norm's weight (Gemma: 1). A norm's new weight is rounded to bfloat16 and the factors
    are adjusted to that, so that a 16-bit checkpoint is exact.
    """
    base = site.base(factors)
    if site.is_norm:
        name = site.source + WEIGHT
        old = arrays[name].astype(np.float32)
        stored = ((old + offset) / base - offset).astype(ml_dtypes.bfloat16).astype(np.float32)
        is_nonzero = (stored + offset) != 0
        base = np.divide(old + offset, stored + offset, out=np.ones_like(old), where=is_nonzero)
        arrays[name] = np.where(is_nonzero, stored, old)
    else:
        arrays[site.source + WEIGHT] = arrays[site.source + WEIGHT] / base[:, None]
        if site.source + BIAS in arrays:
            arrays[site.source + BIAS] = arrays[site.source + BIAS] / base
    factors = site.spread(base)
    for linear in site.linears:
        arrays[linear + WEIGHT] = arrays[linear + WEIGHT] * factors
    return ScaleFold(site, factors)


def scaled_weights(x: InputStatistics, factors: Floats) -> InputStatistics:
    """Return the statistics of x / factors."""
    inverse = (1 / factors).astype(np.float32)
    return InputStatistics(x.linears, x.gram * np.outer(inverse, inverse), x.amax * inverse, x.mean * inverse)


def _relative(w: Floats, grid: Grid) -> Floats:
    """Return the mean over rows of |w| relative to the largest of its group, (K,)."""
    result = np.empty(w.shape[1], np.float32)
    for inputs, groups in runs(w.shape[1], grid.group_of(w.shape[1])):
        x = np.abs(grouped(w[:, inputs], groups))
        most = x.max(axis=2, keepdims=True)
        result[inputs] = np.divide(x, most, out=np.zeros_like(x), where=most > 0).mean(axis=0).reshape(-1)
    return result


def _normalised(base: Array) -> Array:
    """Normalize so that the largest and the smallest factor are reciprocal."""
    base = np.maximum(base, 1e-4)
    result: Array = base / np.sqrt(base.max() * base.min())
    return result
