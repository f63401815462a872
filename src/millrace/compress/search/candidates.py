"""Candidate formats of each layer in a mixed-precision search: their losses, and a store of rounded matrices.

The store makes it possible to assemble a mix without rounding again. A matrix has N outputs and K inputs. AWQ and
SmoothQuant are omitted: they require the same treatment for all layers of a site, and in addition to clipped ranges
their gain is below two standard errors (docs/log.md).
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import msgspec
import numpy as np
from msgspec.structs import replace as replaced

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.compile.settings import Progress
from millrace.compress.calibration.calibrated_methods import fp8_by_gptq, method_of
from millrace.compress.calibration.layerwise_rounding import before, rounding
from millrace.compress.calibration.statistics import CalibrationStatistics, InputStatistics, whole_file
from millrace.compress.checkpoint.tensor_layout import Matrix, StoredTensorSpec, TensorLayout
from millrace.compress.compress import CompressedPiece, CompressionMethod
from millrace.compress.compression_plan import WEIGHT, CompressionPlan, kept_dtype, seconds_a_million
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics
from millrace.compress.measure.reconstruction_error import output_error
from millrace.compress.methods.e4m3 import BF16, E4M3, Fp8Matrix
from millrace.compress.methods.quantization_grid import Array, slabs
from millrace.compress.recipe import PRESETS, LayerRecipe, Recipe
from millrace.errors import CheckpointError, ConfigError

VERSION = 3  # of the arithmetic of the formats
FLOAT, _BYTES = "float", "-a8"  # the suffix of formats with 8-bit activations
_ROWS_OF_8, FP8 = replace(PRESETS["int8-wo"].usual, method="gptq"), "fp8"
_FOUR = LayerRecipe(method="gptq", search="clip")
_GROUPS = (128, 64, 32)
TREATMENTS: Mapping[str, LayerRecipe] = {
    FLOAT: LayerRecipe(method="none"),
    "int8": _ROWS_OF_8,
    "int8-a8": replace(_ROWS_OF_8, activations=8),
    FP8: replace(PRESETS["fp8-gptq"].usual, activations=16),  # as measured and timed here
    **{f"int4-g{group}": replace(_FOUR, group=group) for group in _GROUPS},
    **{f"int4-g{group}-a8": replace(_FOUR, group=group, activations=8) for group in _GROUPS},
}


def candidate_formats(K: int) -> list[str]:
    """Return the formats for a matrix with K inputs: groups must divide them."""
    return [n for n, t in TREATMENTS.items() if n == FLOAT or not t.group or K % t.group == 0]


def _stored(K: int) -> list[str]:
    """Return the formats that have a separate matrix."""
    return [name for name in candidate_formats(K) if name != FLOAT and not name.endswith(_BYTES)]


def stored_formats(plan: CompressionPlan) -> list[str]:
    """Return the formats that any layer is rounded to in a search."""
    inputs = {plan.checkpoint.tensors[layer + WEIGHT].shape[1] for layer in plan.layers}
    return list(dict.fromkeys(name for K in sorted(inputs, reverse=True) for name in _stored(K)))


def rounding_seconds(plan: CompressionPlan) -> float:
    """Estimate the seconds of a survey of all layers on two idle cores."""
    shapes = [plan.checkpoint.tensors[layer + WEIGHT].shape for layer in plan.layers]
    return sum(N * K / 1e6 * seconds_a_million(TREATMENTS[name]) for N, K in shapes for name in _stored(K))


def form_of(name: str) -> TensorLayout | None:
    """Return the storage layout of a format; None for floats."""
    t = TREATMENTS[name]
    return None if name == FLOAT else TensorLayout(t.bits, t.group, t.minimums, t.fp8, t.activation_bits)


def bytes_of(plan: CompressionPlan, layer: str, name: str) -> int:
    """Return the bytes of a layer in the folder, including scales."""
    shape, form = plan.checkpoint.tensors[layer + WEIGHT].shape, form_of(name)
    if form is None:
        return StoredTensorSpec(kept_dtype(plan.checkpoint, layer + WEIGHT), shape).nbytes
    N, K = shape
    return sum(spec.nbytes for spec in form.specs(N, K).values())


def recipe_of(chosen: Mapping[str, str], name: str = "mix") -> Recipe:
    """Return the recipe of a mix: the most frequent format is its default. chosen: format by layer"""
    formats = list(chosen.values())
    usual = max(TREATMENTS, key=lambda f: (f != FLOAT and formats.count(f), f))
    exceptions = tuple((layer, TREATMENTS[own]) for layer, own in chosen.items() if own != usual)
    return Recipe(name, TREATMENTS[usual], exceptions)


@dataclass(frozen=True, slots=True)
class CandidateLoss:
    matrix: Matrix
    figures: LayerDiagnostics

    @property
    def error(self) -> float:
        """Return the lost share of the output's energy."""
        return self.figures.error


@dataclass(frozen=True, slots=True)
class RoundedMatrixStore:
    """Rounded matrices of a model in a folder, by layer and format.

    The precision of activations affects the loss but not the matrix. Files are written atomically, so an
    interrupted run leaves complete files.
    """

    folder: Path

    @classmethod
    def next_to(cls, statistics: Path) -> "RoundedMatrixStore":
        """Return the store in the statistics' folder. Its name has a digest of the formats' definitions."""
        definitions = msgspec.json.encode((VERSION, msgspec.to_builtins(TREATMENTS)))
        return cls(statistics / f"formats-{hashlib.blake2b(definitions, digest_size=6).hexdigest()}")

    def put(self, layer: str, format: str, candidate: CandidateLoss, of_activations: float) -> None:
        """Store a matrix. of_activations: additional loss of 8-bit activations"""
        matrix, form = candidate.matrix, [0, 0]
        codes, scales = matrix.codes, matrix.scales
        if isinstance(matrix, Fp8Matrix):
            codes, scales = codes.view(np.uint8), scales.view(np.uint16)  # NumPy's file format has no such types
        else:
            assert matrix.minimums is None and matrix.scale_levels is None, "candidates are symmetric"
            form = [matrix.group, matrix.bits]
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self._file(layer, format)) as file:
            diagnostics = np.frombuffer(msgspec.json.encode(candidate.figures), np.uint8)
            np.savez(
                file,
                codes=codes,
                scales=scales,
                losses=[candidate.error, of_activations],
                form=form,
                figures=diagnostics,
            )

    def has(self, layer: str, format: str) -> bool:
        return self._file(layer, format).is_file()

    def losses(self, layer: str, format: str) -> tuple[float, float]:
        """Return the weights' loss, and the additional loss of 8-bit activations. raises ConfigError if damaged"""
        with self._opened(layer, format) as arrays:
            weights, activations = arrays["losses"].tolist()
            return weights, activations

    def get(self, layer: str, format: str) -> CandidateLoss:
        """Read a matrix with its loss. raises ConfigError if the file is damaged"""
        with self._opened(layer, format) as arrays:
            codes, scales = arrays["codes"], arrays["scales"]
            diagnostics = msgspec.json.decode(arrays["figures"].tobytes(), type=LayerDiagnostics)
            if format == FP8:
                return CandidateLoss(Fp8Matrix(codes.view(E4M3), scales.view(BF16)), diagnostics)
            group, bits = arrays["form"].tolist()
            return CandidateLoss(QuantisedMatrix(codes, scales, group, bits), diagnostics)

    def _file(self, layer: str, format: str) -> Path:
        return self.folder / f"{layer}.{format.removesuffix(_BYTES)}.npz"

    @contextmanager
    def _opened(self, layer: str, format: str) -> Iterator[Mapping[str, Array]]:
        file = self._file(layer, format)
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                yield arrays
        except (OSError, ValueError, KeyError, BadZipFile, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{file} is damaged: {error}", "what was written", "remove it, and search again"
            ) from error

    def method(self, chosen: Mapping[str, str]) -> CompressionMethod:
        """Return the method that applies `recipe_of(chosen)` from stored matrices, with identical results."""

        def pieces(plan: CompressionPlan) -> Iterator[CompressedPiece]:
            for name in plan.layers:
                arrays = self.get(name, chosen[name])
                yield CompressedPiece({name: arrays.matrix}, {name: arrays.error}, figures={name: arrays.figures})

        return pieces


def shelf_bytes(plan: CompressionPlan) -> int:
    """Return the bytes of all candidates' matrices: a byte per code, and scales."""
    total = 0
    for layer in plan.layers:
        N, K = plan.checkpoint.tensors[layer + WEIGHT].shape
        for name in _stored(K):
            total += N * K + 2 * N * (K // (TREATMENTS[name].group or K))
    return total


def survey(
    plan: CompressionPlan, statistics: CalibrationStatistics, store: RoundedMatrixStore, progress: Progress
) -> dict[str, dict[str, float]]:
    """Compute the loss of each format for each layer of the plan: the share of its output's energy.

    The plan determines the layers; its recipe does not matter. Matrices that are already stored are reused.
    Memory holds one layer's matrix and Gram matrix.
    raises CheckpointError if a layer has no statistics
    """
    result: dict[str, dict[str, float]] = {}
    x: InputStatistics | None = None
    for number, layer in enumerate(plan.layers):
        progress("trying formats, layer by layer", number, len(plan.layers))
        if layer not in statistics:
            raise CheckpointError(
                f"the model does not read {layer}: it has no statistics", "layers of this model",
                "name its formats in a recipe of your own, without --max-loss",
            )  # fmt: skip
        names = _stored(plan.checkpoint.tensors[layer + WEIGHT].shape[1])
        if not all(store.has(layer, name) for name in names):
            x = x if x is not None and layer in x.linears else statistics[layer]
            w = np.asarray(plan.checkpoint.tensors.load(layer + WEIGHT), np.float32)
            of_activations = activation_errors(w, x, [TREATMENTS[name].group for name in names])
            for name in names:
                store.put(layer, name, _tried(w, x, TREATMENTS[name]), of_activations[TREATMENTS[name].group])
        result[layer] = {FLOAT: 0.0}
        for name in names:
            weights, activations = store.losses(layer, name)
            result[layer] |= {name: weights}
            if f"{name}{_BYTES}" in TREATMENTS:
                result[layer] |= {f"{name}{_BYTES}": weights + activations}
    return result


def _tried(w: Array, x: InputStatistics, treatment: LayerRecipe) -> CandidateLoss:
    if treatment.fp8:
        return CandidateLoss(*fp8_by_gptq(w, x))
    method = method_of(treatment, treatment.group)
    assert method is not None
    rounded = rounding(w, x, method)
    return CandidateLoss(rounded.matrix, replaced(before(w, x, method), error=rounded.error))


def activation_errors(w: Array, x: InputStatistics, groups: Sequence[int]) -> dict[int, float]:
    """Estimate the loss of 8-bit activations for each group size (0: a whole row), as a share of the output's energy.

    Only x is rounded. A group of x has the scale amax / 127, and rounding has a variance of scale^2 / 12 per element.
    The mean of amax^2 is estimated from the Gram matrix's diagonal: it is at least the group's largest element, and
    for normal values of equal variance their mean times 2 ln(2 n). The larger estimate is used.
    """
    energy = x.gram.diagonal().astype(np.float64)
    columns, total = np.zeros(len(energy)), output_error(w, x.gram)
    for rows in slabs(*w.shape):
        columns += np.square(w[rows], dtype=np.float64).sum(axis=0)
    result = {}
    for group in groups:
        n = group or len(energy)
        each = energy.reshape(-1, n)
        amax2 = np.maximum(each.max(axis=1), 2 * math.log(2 * n) * each.mean(axis=1))
        noise = float((columns.reshape(-1, n).sum(axis=1) * amax2).sum()) / (12 * 127**2)
        result[group] = noise / total if total else 0.0
    return result
