"""Recipes that need statistics: where these come from, what they take, and the methods as a recipe names them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.settings import Progress
from millrace.compile.source import Source
from millrace.compress.calibration.calibration_pass import collect, digest_of, samples
from millrace.compress.calibration.layerwise_rounding import Method, rounded_layers
from millrace.compress.calibration.statistics import (
    ABOUT,
    CalibrationStatistics,
    InputStatistics,
    input_bytes,
    read_about,
)
from millrace.compress.compress import CompressedPiece, Way, by_layers, rounded_alone
from millrace.compress.compression_plan import SAME_INPUT, WEIGHT, CompressionPlan
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics, figures, lost
from millrace.compress.measure.reconstruction_error import relative_error
from millrace.compress.methods.awq_smoothquant import AUTOAWQ, Awq, SmoothQuant
from millrace.compress.methods.e4m3 import Fp8Matrix, rounded_e4m3
from millrace.compress.methods.gptq import LLM_COMPRESSOR, gptq_e4m3
from millrace.compress.methods.quantization_grid import Array
from millrace.compress.methods.sparsity_2_4 import OF, prune_2_4_magnitude, sparse
from millrace.compress.methods.structured_pruning import pruned
from millrace.compress.presets import SAMPLES
from millrace.compress.recipe import CLIP, RMS, SEARCHES, LayerRecipe
from millrace.errors import CheckpointError, ConfigError
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_files import read_text
from millrace.evaluate.text_windows import Windows

_MOST_BYTES = 16 << 20  # of the text: 4 million tokens, where 65,536 are taken
_FLOPS = 1.1e11  # a second, of the pass on two cores of an AVX-512 server: for estimates alone
_LAYER_BYTES, _GRAM_BYTES, _ROW_BYTES = 16, 24, 4 * 8192


@dataclass(frozen=True, slots=True)
class Needs:
    """About what statistics take. disk_bytes: of their folder; carried_bytes: there besides until the pass is over"""

    disk_bytes: int
    memory_bytes: int
    seconds: float
    carried_bytes: int


def needs(job: CompressionPlan, tokens: int) -> Needs:
    """Of a pass over so many tokens, from the headers: all layers are collected, whichever the job is about."""
    widths: dict[str, list[int]] = {}
    weights: dict[str, int] = {}
    for name, info in job.checkpoint.tensors.items():
        if len(info.shape) != 2 or ".layers." not in name:
            continue
        (N, K), name = info.shape, name.removesuffix(WEIGHT)
        layer = name.rsplit(".", 2)[0]
        weights[layer] = weights.get(layer, 0) + N * K
        if not name.endswith(SAME_INPUT):
            widths.setdefault(layer, []).append(K)
    inputs = [K for some in widths.values() for K in some]
    rows = max(sum(some) for some in widths.values())
    memory = _LAYER_BYTES * max(weights.values()) + _GRAM_BYTES * max(inputs) ** 2 + _ROW_BYTES * rows
    flops = 2 * tokens * (sum(weights.values()) + sum(K * K for K in inputs))
    carried = 2 * 4 * job.checkpoint.decoder.hidden_size * tokens  # what a layer reads, and what it gives, in float32
    return Needs(sum(map(input_bytes, inputs)), memory, flops / _FLOPS, carried)


def sampled(checkpoint: Checkpoint, file: str, n: int) -> Windows:
    """n samples of 512 tokens, or of the whole context, of a text. raises ConfigError for one that is none, or short"""
    text = read_sampled(file, n)
    if not checkpoint.has_tokenizer:
        raise ConfigError(
            f"{checkpoint.folder} has no tokenizer to read --samples-from with", "one beside the weights",
            'add it, or choose a recipe without statistics, such as "int4-wo-mse"',
        )  # fmt: skip
    length = min(LENGTH, Source.from_checkpoint(checkpoint).max_context)
    return samples(checkpoint.tokenizer, text, n, length)


def read_sampled(file: str, n: int = SAMPLES) -> str:
    """raises ConfigError"""
    return read_text(file, "--samples-from", _MOST_BYTES, f"a text of at least {n * LENGTH:,} tokens")


def is_of(checkpoint: Checkpoint, content: str, digest: str, tokens: int) -> bool:
    """Whether so many tokens of this digest were sampled from this text, by this checkpoint's tokenizer."""
    length = min(LENGTH, Source.from_checkpoint(checkpoint).max_context)
    n, rest = divmod(tokens, length)
    if rest or not n or len(checkpoint.tokenizer.encode(content)) < tokens:
        return False
    return digest_of(samples(checkpoint.tokenizer, content, n, length)) == digest


def statistics_of(
    checkpoint: Checkpoint, text: Windows | None, folder: Path, progress: Progress
) -> CalibrationStatistics:
    """Collected into the folder, which may have some or all; without a text it must have all.

    raises ConfigError for those of another model or text, or none
    """
    source = Source.from_checkpoint(checkpoint)
    if text is not None:
        return _of_its_sizes(collect(source, text, folder, progress=progress), checkpoint)
    if not (folder / ABOUT).is_file():
        raise ConfigError(f"{folder} has no statistics yet", "a text to collect them on", "name one: --samples-from")
    if read_about(folder).model != source.identity():
        raise ConfigError(
            f"the statistics in {folder} are of another model", f"those of {checkpoint.folder}",
            "name another folder, or collect them: --samples-from",
        )  # fmt: skip
    return _of_its_sizes(CalibrationStatistics.open(folder), checkpoint)


def _of_its_sizes(statistics: CalibrationStatistics, checkpoint: Checkpoint) -> CalibrationStatistics:
    """raises ConfigError for a folder that says it is of this model, and is not"""
    for name in statistics:
        info = checkpoint.tensors.get(name + WEIGHT)
        if info is not None and info.shape[-1] != statistics.size(name):
            raise ConfigError(
                f"the statistics of {name} are of {statistics.size(name):,} inputs",
                f"{info.shape[-1]:,}, as its weights",
                "they are damaged: collect them again, into another folder",
            )  # fmt: skip
    return statistics


def method_of(treatment: LayerRecipe, group: int) -> Method | None:
    """group: that fits the layer. None for what is no rounding to integers."""
    if treatment.method not in ("rtn", "gptq"):
        return None
    smooth: dict[str, Awq | SmoothQuant] = {
        "awq": AUTOAWQ,
        "smoothquant": SmoothQuant(treatment.alpha, linears=True, rms=treatment.sizes == RMS),
    }
    return Method(
        grid=treatment.grid(group), smooth=smooth.get(treatment.smooth), search=SEARCHES[treatment.search],
        clip=treatment.search == CLIP, gptq=LLM_COMPRESSOR if treatment.method == "gptq" else None,
    )  # fmt: skip


def by_statistics(statistics: CalibrationStatistics) -> Way:
    """Layer by layer as the job's recipe says, then by themselves those that statistics are not for: FP8, a head."""

    def pieces(job: CompressionPlan) -> Iterator[CompressedPiece]:
        methods = {name: method_of(treatment, form.group) for name, (treatment, form) in job.layers.items()}
        every = {**{name: treatment for name, (treatment, _) in job.layers.items()}, **job.sparse}
        for name, treatment in every.items():
            if treatment.calibrated and name not in statistics:
                raise CheckpointError(
                    f"the model does not read {name}: it has no statistics", "a layer of this model",
                    f'leave it as it is: method = "none", match = "{name}"',
                )  # fmt: skip
        tensors, config = job.checkpoint.tensors, job.checkpoint.decoder
        shapes = {name: info.shape for name, info in tensors.items()}
        offset = 1.0 if config.family.startswith("gemma") else 0.0  # its norms multiply with 1 + weight
        layers = rounded_layers(tensors.load, shapes, statistics, methods.get, config.head_dim, offset)
        left = dict.fromkeys(job.layers)
        for piece in by_layers(layers)(job):
            for name in piece.matrices:
                del left[name]
            yield piece
        for name in left:
            treatment, _ = job.layers[name]
            x = statistics.get(name)
            yield rounded_alone(job, name, x) if x is None or not treatment.calibrated else _in_fp8(job, name, x)
        for name, treatment in job.sparse.items():
            yield _thinned(job, name, treatment, statistics)
        if job.pruned:
            sizes, smaller = job.pruned
            for number in range(config.n_layers):
                result = pruned(tensors.load, smaller, number, statistics, config, sizes)
                yield CompressedPiece({}, errors_of(result.figures), result.floats, result.figures)

    return pieces


def _in_fp8(job: CompressionPlan, name: str, x: InputStatistics) -> CompressedPiece:
    rounded, why = fp8_by_gptq(job.checkpoint.tensors.load(name + WEIGHT), x)
    return CompressedPiece({name: rounded}, {name: why.error}, figures={name: why})


def fp8_by_gptq(w: Array, x: InputStatistics) -> tuple[Fp8Matrix, LayerDiagnostics]:
    rounded, _ = gptq_e4m3(w, x.gram)
    return rounded, figures(w, 0, lost(w, rounded, x), x, nearest=lost(w, rounded_e4m3(w), x))


def _thinned(
    job: CompressionPlan, name: str, treatment: LayerRecipe, statistics: CalibrationStatistics
) -> CompressedPiece:
    w, x = job.checkpoint.tensors.load(name + WEIGHT), statistics[name]
    rounded = sparse(w, x, treatment.method)
    plain = relative_error(w, prune_2_4_magnitude(w), x.gram)
    why = figures(w, OF, rounded.error, x, nearest=plain, plain="dropping the smallest weights")
    return CompressedPiece({}, {name: rounded.error}, {name + WEIGHT: rounded.weights}, {name: why})


def errors_of(why: Mapping[str, LayerDiagnostics]) -> dict[str, float]:
    return {name: one.error for name, one in why.items()}


def same_file(a: str, b: str) -> bool:
    """Whether both name one file that is there."""
    return Path(a).exists() and Path(b).exists() and Path(a).samefile(b)
