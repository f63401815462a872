"""Recipes that need calibration statistics: collects these, estimates their cost, maps recipe keys to methods."""

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
from millrace.compress.compress import CompressedPiece, CompressionMethod, by_layers, rounded_alone
from millrace.compress.compression_plan import SAME_INPUT, WEIGHT, CompressionPlan
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics, figures, relative_loss
from millrace.compress.measure.reconstruction_error import relative_error
from millrace.compress.methods.awq_smoothquant import AUTOAWQ, Awq, SmoothQuant
from millrace.compress.methods.e4m3 import Fp8Matrix, rounded_e4m3
from millrace.compress.methods.gptq import LLM_COMPRESSOR, gptq_e4m3
from millrace.compress.methods.quantization_grid import Array
from millrace.compress.methods.sparsity_2_4 import GROUP_SIZE, prune_2_4_magnitude, sparse
from millrace.compress.methods.structured_pruning import pruned
from millrace.compress.presets import SAMPLES
from millrace.compress.recipe import CLIP, RMS, SEARCHES, LayerRecipe
from millrace.errors import CheckpointError, ConfigError
from millrace.evaluate.sizes import LENGTH
from millrace.evaluate.text_files import read_text
from millrace.evaluate.text_windows import Windows

_MAX_BYTES = 16 << 20  # limit of the text: 4 million tokens, of which 65,536 are sampled
_FLOPS = 1.1e11  # per second, of the pass on two cores of an AVX-512 server; for estimates only
_LAYER_BYTES, _GRAM_BYTES, _ROW_BYTES = 16, 24, 4 * 8192


@dataclass(frozen=True, slots=True)
class StatisticsCost:
    """Estimated cost of statistics. disk_bytes: of their folder; carried_bytes: needed in addition during the pass"""

    disk_bytes: int
    memory_bytes: int
    seconds: float
    carried_bytes: int


def needs(plan: CompressionPlan, tokens: int) -> StatisticsCost:
    """Estimate the cost of a pass over `tokens` tokens, from the headers. It collects all layers, whatever the plan."""
    widths: dict[str, list[int]] = {}
    weights: dict[str, int] = {}
    for name, info in plan.checkpoint.tensors.items():
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
    carried = 2 * 4 * plan.checkpoint.decoder.hidden_size * tokens  # a layer's input and output, in float32
    return StatisticsCost(sum(map(input_bytes, inputs)), memory, flops / _FLOPS, carried)


def sampled(checkpoint: Checkpoint, file: str, n: int) -> Windows:
    """Sample n windows of 512 tokens, or of the whole context. raises ConfigError if it is no text or too short"""
    text = read_sampled(file, n)
    if not checkpoint.has_tokenizer:
        raise ConfigError(
            f"{checkpoint.folder} has no tokenizer to read --samples-from with", "one beside the weights",
            'add it, or choose a recipe without statistics, such as "int4-wo-mse"',
        )  # fmt: skip
    length = min(LENGTH, Source.from_checkpoint(checkpoint).max_context)
    return samples(checkpoint.tokenizer, text, n, length)


def read_sampled(file: str, n: int = SAMPLES) -> str:
    """Read a text to sample from. raises ConfigError"""
    return read_text(file, "--samples-from", _MAX_BYTES, f"a text of at least {n * LENGTH:,} tokens")


def is_of(checkpoint: Checkpoint, content: str, digest: str, tokens: int) -> bool:
    """Whether `tokens` tokens with this digest were sampled from this text by this checkpoint's tokenizer."""
    length = min(LENGTH, Source.from_checkpoint(checkpoint).max_context)
    n, rest = divmod(tokens, length)
    if rest or not n or len(checkpoint.tokenizer.encode(content)) < tokens:
        return False
    return digest_of(samples(checkpoint.tokenizer, content, n, length)) == digest


def statistics_of(
    checkpoint: Checkpoint, text: Windows | None, folder: Path, progress: Progress
) -> CalibrationStatistics:
    """Collect statistics into the folder, which may already have some or all; without a text it must have all.

    raises ConfigError if they are of another model or text, or missing
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
    """Check the sizes of inputs. raises ConfigError if they do not match the model"""
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
    """Return a layer's method; None if it is not rounded to integers. group: the size that fits the layer"""
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


def by_statistics(statistics: CalibrationStatistics) -> CompressionMethod:
    """Round layer by layer with the recipe's methods, then separately those that need no statistics: FP8, the head."""

    def pieces(plan: CompressionPlan) -> Iterator[CompressedPiece]:
        methods = {name: method_of(treatment, form.group) for name, (treatment, form) in plan.layers.items()}
        every = {**{name: treatment for name, (treatment, _) in plan.layers.items()}, **plan.sparse}
        for name, treatment in every.items():
            if treatment.calibrated and name not in statistics:
                raise CheckpointError(
                    f"the model does not read {name}: it has no statistics", "a layer of this model",
                    f'leave it as it is: method = "none", match = "{name}"',
                )  # fmt: skip
        tensors, config = plan.checkpoint.tensors, plan.checkpoint.decoder
        shapes = {name: info.shape for name, info in tensors.items()}
        offset = 1.0 if config.family.startswith("gemma") else 0.0  # its norms multiply by 1 + weight
        layers = rounded_layers(tensors.load, shapes, statistics, methods.get, config.head_dim, offset)
        left = dict.fromkeys(plan.layers)
        for piece in by_layers(layers)(plan):
            for name in piece.matrices:
                del left[name]
            yield piece
        for name in left:
            treatment, _ = plan.layers[name]
            x = statistics.get(name)
            yield rounded_alone(plan, name, x) if x is None or not treatment.calibrated else _in_fp8(plan, name, x)
        for name, treatment in plan.sparse.items():
            yield _thinned(plan, name, treatment, statistics)
        if plan.pruned:
            sizes, smaller = plan.pruned
            for number in range(config.n_layers):
                result = pruned(tensors.load, smaller, number, statistics, config, sizes)
                yield CompressedPiece({}, errors_of(result.figures), result.floats, result.figures)

    return pieces


def _in_fp8(plan: CompressionPlan, name: str, x: InputStatistics) -> CompressedPiece:
    rounded, layer_figures = fp8_by_gptq(plan.checkpoint.tensors.load(name + WEIGHT), x)
    return CompressedPiece({name: rounded}, {name: layer_figures.error}, figures={name: layer_figures})


def fp8_by_gptq(w: Array, x: InputStatistics) -> tuple[Fp8Matrix, LayerDiagnostics]:
    rounded, _ = gptq_e4m3(w, x.gram)
    return rounded, figures(w, 0, relative_loss(w, rounded, x), x, nearest=relative_loss(w, rounded_e4m3(w), x))


def _thinned(
    plan: CompressionPlan, name: str, treatment: LayerRecipe, statistics: CalibrationStatistics
) -> CompressedPiece:
    w, x = plan.checkpoint.tensors.load(name + WEIGHT), statistics[name]
    rounded = sparse(w, x, treatment.method)
    plain = relative_error(w, prune_2_4_magnitude(w), x.gram)
    layer_figures = figures(w, GROUP_SIZE, rounded.error, x, nearest=plain, plain="dropping the smallest weights")
    return CompressedPiece({}, {name: rounded.error}, {name + WEIGHT: rounded.weights}, {name: layer_figures})


def errors_of(diagnostics: Mapping[str, LayerDiagnostics]) -> dict[str, float]:
    return {name: one.error for name, one in diagnostics.items()}


def same_file(a: str, b: str) -> bool:
    """Whether both name the same existing file."""
    return Path(a).exists() and Path(b).exists() and Path(a).samefile(b)
