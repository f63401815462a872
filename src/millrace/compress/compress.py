"""Compresses a checkpoint into a folder: writes compressed matrices, copies the rest, and verifies by reading all."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

import millrace
from millrace.checkpoint.checkpoint import CONFIG, Checkpoint, GgufCheckpoint
from millrace.checkpoint.compressed.scheme import KEY
from millrace.checkpoint.config.config_writer import config_json as config_of
from millrace.checkpoint.tokenizer.tokenizer import read_json_object
from millrace.checkpoint.weights.safetensors import Tensors
from millrace.compile.settings import Progress
from millrace.compress.calibration.layerwise_rounding import RoundedLayer
from millrace.compress.calibration.statistics import InputStatistics
from millrace.compress.checkpoint.checkpoint_writer import TensorWriter, check_place, unfinished
from millrace.compress.checkpoint.compression_record import AppliedMethod, write_record
from millrace.compress.checkpoint.tensor_layout import NAMES, Matrix, TensorLayout, described
from millrace.compress.compression_plan import WEIGHT, CompressionPlan
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics, figures, relative_loss
from millrace.compress.methods.e4m3 import Fp8Matrix, rounded_e4m3
from millrace.compress.methods.quantization_grid import Array, rounded
from millrace.compress.methods.structured_pruning import config_of as pruned_config
from millrace.compress.recipe import SEARCHES, LayerRecipe
from millrace.compress.recipe import to_dict as recipe_of
from millrace.compress.report.page import write_page
from millrace.errors import CheckpointError, MachineError

_DTYPES = {name: np.dtype(getattr(ml_dtypes, kind, None) or kind) for kind, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class CompressedPiece:
    """A unit of output of a method.

    matrices: by linear layer; errors: share of each one's energy, or of its output's, that is lost
    floats: other changed tensors, by name; figures: diagnostics of the errors, if known
    """

    matrices: Mapping[str, Matrix]
    errors: Mapping[str, float]
    floats: Mapping[str, Array] = field(default_factory=dict)
    figures: Mapping[str, LayerDiagnostics] = field(default_factory=dict)


CompressionMethod = Callable[
    [CompressionPlan], Iterator[CompressedPiece]
]  # carries out a plan: with a `layers.Method` for each layer, or without any


@dataclass(frozen=True, slots=True)
class CompressionResult:
    """Result of a compression. errors: by linear layer"""

    folder: Path
    plan: CompressionPlan
    errors: Mapping[str, float]

    @property
    def worst(self) -> list[tuple[str, float]]:
        """Return layers with their errors, largest first."""
        return sorted(self.errors.items(), key=lambda item: -item[1])


def by_rounding(plan: CompressionPlan) -> Iterator[CompressedPiece]:
    """Round each matrix separately to the nearest values of its grid, which needs no data."""
    for name in plan.layers:
        yield rounded_alone(plan, name)


def rounded_alone(plan: CompressionPlan, name: str, x: InputStatistics | None = None) -> CompressedPiece:
    """Round one matrix. x: statistics of its input, if known; they affect only how errors are measured"""
    treatment, form = plan.layers[name]
    w = plan.checkpoint.tensors.load(name + WEIGHT)
    try:
        matrix: Matrix = (
            rounded_e4m3(w, one_scale=form.one_scale)
            if form.floats
            else rounded(w, treatment.grid(form.group), SEARCHES[treatment.search])
        )
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error.what}", error.expected, error.fix) from error
    off = relative_loss(w, matrix, x)
    nearest = relative_loss(w, rounded(w, treatment.grid(form.group)), x) if SEARCHES[treatment.search] else None
    return CompressedPiece({name: matrix}, {name: off}, figures={name: figures(w, form.group, off, x, nearest=nearest)})


def by_layers(layers: Iterable[RoundedLayer]) -> CompressionMethod:
    """Return the method that writes layers rounded with statistics (`rounded_layers`) on the grids of the plan."""

    def pieces(plan: CompressionPlan) -> Iterator[CompressedPiece]:
        for layer in layers:
            matrices = {name: rounding.matrix for name, rounding in layer.matrices.items() if name in plan.layers}
            errors = {name: layer.matrices[name].error for name in matrices}
            yield CompressedPiece(
                matrices, errors, layer.floats, {n: layer.figures[n] for n in matrices if n in layer.figures}
            )

    return pieces


def compress(
    plan: CompressionPlan, out: Path, method: CompressionMethod = by_rounding, progress: Progress = lambda *_: None
) -> CompressionResult:
    """Write the folder `out`, which must not exist: complete and verified, or not at all. Memory: a unit of `method`.

    raises ConfigError if the folder exists, MachineError if the disk is full, CheckpointError for errors of the source
    """
    check_place(out, plan.bytes_after)
    errors: dict[str, float] = {}
    layer_figures: dict[str, LayerDiagnostics] = {}
    with unfinished(out) as path:
        folder, digests, done = TensorWriter(path, plan.specs), dict[str, bytes](), 0
        sizes = _sizes(plan)
        total = sum(sizes.values())
        left = {name for name in plan.checkpoint.tensors if name.removesuffix(WEIGHT) not in plan.layers}
        for piece in method(plan):
            for name, matrix in piece.matrices.items():
                progress(f"compressing {name}", done, total)
                for part, array in plan.layers[name][1].tensors(matrix).items():
                    folder.put(f"{name}.{part}", array)
                digests[name + WEIGHT] = _digest(matrix)
                done += sizes[name]
            for name, array in piece.floats.items():
                progress(f"compressing {name.removesuffix(WEIGHT)}", done, total)
                digests[name] = _put(folder, plan, name, array)
                done += sizes.get(name.removesuffix(WEIGHT), 0)
            left -= piece.floats.keys()
            errors |= piece.errors
            layer_figures |= piece.figures
        for name in sorted(left):
            digests[name] = _put(folder, plan, name, plan.checkpoint.tensors.load(name))
        folder.finish()
        _write_small(plan, path, errors, layer_figures)
        _prove(path, digests, progress)
    return CompressionResult(out, plan, errors)


def _sizes(plan: CompressionPlan) -> dict[str, int]:
    """Return the stored bytes of each changed layer."""
    result = dict.fromkeys(plan.treated, 0)
    for tensor, spec in plan.specs.items():
        layer = tensor.rpartition(".")[0]
        if layer in result:
            result[layer] += spec.nbytes
    return result


def _put(folder: TensorWriter, plan: CompressionPlan, name: str, array: Array) -> bytes:
    with np.errstate(over="ignore"):
        cast = array.astype(_DTYPES[plan.specs[name].dtype])
    folder.put(name, cast)
    return _digest_of([cast])


def _digest(matrix: Matrix) -> bytes:
    if isinstance(matrix, Fp8Matrix):
        return _digest_of([matrix.codes.view(np.int8), matrix.scales.astype(np.float32)])
    return _digest_of([matrix.codes, *matrix.floats])


def _digest_of(arrays: list[Any]) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hasher.update(f"{array.dtype} {array.shape}\n".encode())
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.digest()


def _write_small(
    plan: CompressionPlan, path: Path, errors: Mapping[str, float], diagnostics: Mapping[str, LayerDiagnostics]
) -> None:
    checkpoint = plan.checkpoint
    for name, content in checkpoint.files.items():
        (path / name).write_bytes(content)
    if isinstance(checkpoint, GgufCheckpoint):
        raw = config_of(checkpoint.decoder) | {"dtype": "bfloat16"}
    else:
        raw = read_json_object(checkpoint.folder / CONFIG)
        if not checkpoint.decoder.tie_embeddings and raw.get("tie_word_embeddings") is not False:
            raw["tie_word_embeddings"] = False  # a separate head is stored, whatever the source's or family's setting
    if plan.pruned:
        raw |= pruned_config(checkpoint.decoder, plan.pruned[0])
    if plan.layers:
        forms = {name: form for name, (_, form) in plan.layers.items()}
        raw[KEY] = described(forms, list(plan.ignored), plan.recipe.kv)
    (path / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    write_record(path, {
        "millrace": millrace.__version__, "source": checkpoint.folder.name, "model": checkpoint.identity(),
        "recipe": {"name": plan.recipe.name, **recipe_of(plan.recipe)}, "bits_per_weight": plan.bits_per_weight,
        "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after, "notes": list(plan.notes), "errors": errors,
        "forms": msgspec.to_builtins({name: _form(*of) for name, of in plan.layers.items()}),
        "figures": msgspec.to_builtins(diagnostics),
    })  # fmt: skip
    write_page(path)


def _form(treatment: LayerRecipe, form: TensorLayout) -> AppliedMethod:
    return AppliedMethod(
        treatment.method, form.bits, form.group, treatment.smooth, treatment.search, treatment.minimums
    )  # fmt: skip


def _prove(path: Path, digests: Mapping[str, bytes], progress: Progress) -> None:
    """Read everything again like an engine. raises MachineError if something differs from what was written"""
    tensors: Tensors = Checkpoint.open(path).tensors
    assert set(tensors) == set(digests), set(tensors) ^ set(digests)
    for number, (name, expected) in enumerate(digests.items()):
        progress("reading it again", number, len(digests))
        stored_format = tensors.format(name)
        if stored_format is None:
            result = _digest_of([tensors.load(name)])
        else:
            matrix = tensors.stored(name, 8 if stored_format.bits > 4 else 4, stored_format.group)
            result = _digest(matrix) if matrix else b""
        if result != expected:
            raise MachineError(
                f"{name} does not read back as it was written", "the same bits", "check the disk, and compress it again"
            )
