"""Plans a compression from a checkpoint's headers: layers, formats, sizes, and errors of the recipe."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from millrace.checkpoint.checkpoint import Checkpoint, GgufCheckpoint, QuantizedCheckpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.weights.safetensors import FLOAT_NAMES, TensorInfo
from millrace.compress.checkpoint.tensor_layout import NAMES, StoredTensorSpec, TensorLayout
from millrace.compress.methods.quantization_grid import GROUPS
from millrace.compress.methods.sparsity_2_4 import GROUP_SIZE, SPARSEGPT
from millrace.compress.methods.structured_pruning import Prune, Sizes, shapes, sizes
from millrace.compress.recipe import CLIP, FP8, FP8_GPTQ, FP8_TENSOR, LayerRecipe, Recipe
from millrace.errors import CheckpointError, ConfigError
from millrace.model.families import HEAD

WEIGHT = ".weight"
TABLE = "model.embed_tokens"
_SMALLER = sorted((g for g in GROUPS if g), reverse=True)
SAME_INPUT = (".k_proj", ".v_proj", ".up_proj")  # have the same input as q and gate
# Seconds per million weights, and bytes per element, on two idle cores of an AVX-512 server; for estimates only.
_ROUND_S, _SEARCH_S, _FP8_S, _FP8_SEARCH_S, _GPTQ_S, _AWQ_S = 0.033, 0.2, 0.04, 0.25, 0.17, 0.5
_CLIP_S, _WHOLE_CLIP_S = 0.11, 0.21
_BASE_BYTES, _MATRIX_BYTES, _KEPT_BYTES = 48 << 20, 28, 7
_FLOAT_BYTES, _GRAM_BYTES, _GPTQ_BYTES = 4, 4, 24
_LARGER = 1.005  # ratio to the source's bytes from which a note is shown
_BY_FACTORS = ("gptq", FP8_GPTQ, SPARSEGPT)  # methods that factorize a Gram matrix


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """A plan. layers: treatment and format of each linear layer that is rounded; specs: the tensors to write
    sparse: layers whose weights stay floats and become partly zero; pruned: the remaining sizes, if any is reduced,
        and the tensors that shrink
    """

    checkpoint: Checkpoint
    recipe: Recipe
    layers: Mapping[str, tuple[LayerRecipe, TensorLayout]]
    ignored: tuple[str, ...]
    specs: Mapping[str, StoredTensorSpec]
    notes: tuple[str, ...]
    sparse: Mapping[str, LayerRecipe] = field(default_factory=dict)
    pruned: tuple[Sizes, Mapping[str, tuple[int, ...]]] | None = None

    @property
    def treated(self) -> tuple[str, ...]:
        """Return all layers that are changed."""
        smaller = self.pruned[1] if self.pruned else {}
        return (*self.layers, *self.sparse, *(n.removesuffix(WEIGHT) for n in smaller if n.endswith(WEIGHT)))

    @property
    def n_weights(self) -> int:
        """Return the number of weights in changed layers; only the remaining ones of pruned layers."""
        smaller = self.pruned[1] if self.pruned else {}
        shapes = (smaller.get(n + WEIGHT, self.checkpoint.tensors[n + WEIGHT].shape) for n in self.treated)
        return sum(map(math.prod, shapes))

    @property
    def calibrated(self) -> bool:
        """Whether any layer needs statistics."""
        return bool(self.sparse or self.pruned) or any(treatment.calibrated for treatment, _ in self.layers.values())

    @property
    def bits_per_weight(self) -> float:
        """Return bits per weight of the changed layers, including scales; zeros count like other floats."""
        stored = sum(spec.nbytes for name, spec in self.specs.items() if self._layer(name) and spec.dtype != "I64")
        return 8 * stored / self.n_weights

    @property
    def bytes_before(self) -> int:
        """Return the stored bytes of the source's tensors."""
        return self.checkpoint.tensors.nbytes

    @property
    def bytes_after(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def memory_bytes(self) -> int:
        """Estimate peak memory: the largest matrix or copied tensor, plus what methods with statistics hold."""
        sizes = {name: math.prod(info.shape) for name, info in self.checkpoint.tensors.items()}
        each = (_MATRIX_BYTES if n.removesuffix(WEIGHT) in self.treated else _KEPT_BYTES for n in sizes)
        largest = max(rate * size for rate, size in zip(each, sizes.values(), strict=True))
        return _BASE_BYTES + largest + (self._held_bytes if self.calibrated else 0)

    @property
    def _held_bytes(self) -> int:
        """Estimate the memory of methods with statistics.

        It is a decoder layer in float32 with the Gram matrices of its inputs (twice if scales are folded), or those of
        one matrix; plus GPTQ's factors of the widest one.
        """
        how = [*(treatment for treatment, _ in self.layers.values()), *self.sparse.values()]
        weights, grams, widest = dict[str, int](), dict[str, int](), 0
        for name in self.treated:
            (N, K), layer = self.checkpoint.tensors[name + WEIGHT].shape, name.rsplit(".", 2)[0]
            widest, weights[layer] = max(widest, K), weights.get(layer, 0) + N * K
            grams[layer] = grams.get(layer, 0) + (0 if name.endswith(SAME_INPUT) else K * K)
        factors = _GPTQ_BYTES * widest**2 if any(one.method in _BY_FACTORS for one in how) else 0
        if not any(one.calibrated and one.method in ("rtn", "gptq") for one in how):
            return factors + _GRAM_BYTES * widest**2
        copies = 2 if any(one.smooth != "none" for one in how) else 1
        return factors + max(_FLOAT_BYTES * weights[one] + copies * _GRAM_BYTES * grams[one] for one in weights)

    @property
    def seconds(self) -> float:
        """Estimate the seconds for rounding, without collecting statistics."""
        sizes = (math.prod(self.checkpoint.tensors[name + WEIGHT].shape) for name in self.layers)
        thinned = sum(math.prod(self.checkpoint.tensors[name + WEIGHT].shape) for name in self.sparse)
        rounded = sum(seconds_a_million(t) * size for (t, _), size in zip(self.layers.values(), sizes, strict=True))
        return (rounded + _GPTQ_S * thinned) / 1e6

    def _layer(self, tensor: str) -> bool:
        return tensor.rpartition(".")[0] in self.treated


def seconds_a_million(treatment: LayerRecipe) -> float:
    """Estimate the seconds to round a million weights."""
    if treatment.fp8:
        return _FP8_S + (_FP8_SEARCH_S + _GPTQ_S) * treatment.calibrated
    gptq, awq = treatment.method == "gptq", treatment.smooth == "awq"
    search = _SEARCH_S if treatment.search != "none" else _ROUND_S
    if treatment.search == CLIP:  # separately per group before GPTQ; for AWQ's choice both unscaled and scaled
        search = _CLIP_S if gptq and not awq else _WHOLE_CLIP_S * (1 + awq)
    return search + _GPTQ_S * gptq + _AWQ_S * awq


def plan_compression(checkpoint: Checkpoint, recipe: Recipe) -> CompressionPlan:
    """Plan from headers. raises CheckpointError if the model cannot be compressed, ConfigError for a wrong recipe"""
    _check_source(checkpoint)
    if recipe.prune:
        return _pruning(checkpoint, recipe, recipe.prune)
    tensors = checkpoint.tensors
    # A tied head has no tensor, but readers of config.json see it as a linear layer.
    ignored = [HEAD] if checkpoint.decoder.tie_embeddings else []
    linears = _linears(tensors)
    layers: dict[str, tuple[LayerRecipe, TensorLayout]] = {}
    sparse: dict[str, LayerRecipe] = {}
    smaller: Counter[tuple[int, int, int]] = Counter()
    for name, (_, K) in linears.items():
        if name in ignored:
            continue
        if not _in_a_layer(name) and not _is_named(recipe, name):
            ignored.append(name)  # the head: all tools leave it uncompressed
            continue
        treatment = recipe.layer_recipe(name)
        if treatment.method == "none":
            ignored.append(name)
            continue
        if treatment.calibrated and not _in_a_layer(name):
            raise ConfigError(
                f"the recipe {recipe.name} treats {name} by statistics", "those are of the decoder's layers alone",
                f'give {name} method = "rtn", smooth = "none" and search = "none"',
            )  # fmt: skip
        if treatment.sparse:
            sparse[name] = _thinned(name, K, treatment)
            ignored.append(name)
            continue
        group = _fitting(name, K, treatment.group)
        if group != treatment.group:
            smaller[K, treatment.group, group] += 1
        floats = treatment.fp8, treatment.activation_bits, treatment.activations == FP8, treatment.method == FP8_TENSOR
        form = TensorLayout(treatment.bits, group, treatment.minimums, *floats)
        layers[name] = (treatment, form)
    _check_patterns(recipe, linears)
    if not layers and not sparse:
        raise ConfigError(f"the recipe {recipe.name} leaves all layers as they are", "some to compress", "correct it")
    if recipe.kv and not layers:
        raise ConfigError(
            f"the recipe {recipe.name} says how keys and values are kept, and rounds no weights",
            "some that are rounded: the file of a float model has no place to say it",
            f"serve it with --kv-cache-dtype {recipe.kv}, or round some",
        )  # fmt: skip
    notes = tuple(
        f"{n} matrices of {K:,} inputs have groups of {own}: {requested} does not divide these, and no runtime of this "
        "format has a shorter last group" for (K, requested, own), n in smaller.items()
    )  # fmt: skip
    about, specs = _source_notes(checkpoint) if layers else (), _specs(checkpoint, layers)
    return CompressionPlan(
        checkpoint, recipe, layers, tuple(ignored), specs,
        (*about, *_size_notes(checkpoint, specs), *notes, *_reader_notes(layers), *_sparse_notes(sparse)), sparse,
    )  # fmt: skip


def _pruning(checkpoint: Checkpoint, recipe: Recipe, prune: Prune) -> CompressionPlan:
    """Plan pruning. raises as `plan_compression`"""
    config, every = checkpoint.decoder, {name: info.shape for name, info in checkpoint.tensors.items()}
    left = sizes(config, prune)
    smaller = shapes(every, config, left)
    specs = {
        name: StoredTensorSpec(kept_dtype(checkpoint, name), smaller.get(name, shape)) for name, shape in every.items()
    }
    note = (
        f"{left.channels:,} of {config.intermediate_size:,} MLP channels and {left.heads * config.n_kv_heads} of "
        f"{config.n_heads} query heads are left, with the weights that they had: a pruned model has to be trained "
        "again before it is of use, and that is not done here"
    )
    return CompressionPlan(checkpoint, recipe, {}, (), specs, (note,), pruned=(left, smaller))


def _thinned(name: str, K: int, treatment: LayerRecipe) -> LayerRecipe:
    """Return a sparse layer's treatment. raises CheckpointError if K is not a multiple of 4"""
    if K % GROUP_SIZE:
        raise CheckpointError(
            f"{name} has {K:,} inputs", f"a multiple of {GROUP_SIZE}, of which two are kept",
            f'leave it as it is: method = "none", match = "*{name[name.rfind("."):]}"',
        )  # fmt: skip
    return treatment


def _reader_notes(layers: Mapping[str, tuple[LayerRecipe, TensorLayout]]) -> tuple[str, ...]:
    """Return notes on how transformers (5.23, compressed-tensors 0.20) handles zero points; see docs/compress.md."""
    if not any(form.minimums for _, form in layers.values()):
        return ()
    if len({form for _, form in layers.values()}) > 1:
        return ("transformers reads a folder with zero points by one scheme for all layers, and this one has several: "
                "it is for `millrace` alone",)  # fmt: skip
    return ("transformers reads zero points only with "
            "quantization_config=CompressedTensorsConfig(dequantize=True)",)  # fmt: skip


def _sparse_notes(sparse: Mapping[str, LayerRecipe]) -> tuple[str, ...]:
    if not sparse:
        return ()
    return (
        f"{len(sparse)} matrices have two zeros among four weights, and as many bytes as before: nothing here, and of "
        "what reads such folders next to nothing, is smaller or faster by them",
    )


def _check_source(checkpoint: Checkpoint) -> None:
    if isinstance(checkpoint, QuantizedCheckpoint):
        raise CheckpointError(
            f"{checkpoint.folder} is compressed already", "floats, or a GGUF",
            "name the checkpoint that it was made of: rounding twice loses twice",
        )  # fmt: skip
    if isinstance(checkpoint.config, EncoderConfig):
        raise CheckpointError(
            f"{checkpoint.folder} is an encoder ({checkpoint.config.architecture})", "a model that gives tokens",
            "build it with --precision w8a8 instead",
        )  # fmt: skip


def _source_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    if not isinstance(checkpoint, GgufCheckpoint):
        return ()
    kinds = Counter(info.dtype for info in checkpoint.tensors.values() if info.dtype not in FLOAT_NAMES)
    stored = ", ".join(f"{n} as {kind.upper()}" for kind, n in kinds.most_common())
    return (f"the source holds {stored}: rounded once more, from their exact values",) if kinds else ()


def _size_notes(checkpoint: Checkpoint, specs: Mapping[str, StoredTensorSpec]) -> tuple[str, ...]:
    ratio = sum(spec.nbytes for spec in specs.values()) / checkpoint.tensors.nbytes
    if ratio < _LARGER:
        return ()
    return (f"the folder has {ratio:.2f} times the source's bytes: it is larger, as the source has fewer bits already",)


def _linears(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """Return linear layers' shapes (N, K) by name; a tied head is not included."""
    matrices = {n.removesuffix(WEIGHT): i.shape for n, i in tensors.items() if n.endswith(WEIGHT) and len(i.shape) == 2}
    return {name: shape for name, shape in matrices.items() if name != TABLE}


def _in_a_layer(name: str) -> bool:
    return ".layers." in name


def _is_named(recipe: Recipe, name: str) -> bool:
    return any(pattern == name for pattern, _ in recipe.exceptions)


def _fitting(name: str, K: int, group: int) -> int:
    """Return the largest group up to the requested one that divides K. raises CheckpointError if there is none"""
    if not group:
        return 0
    result = next((g for g in _SMALLER if g <= group and K % g == 0), None)
    if result is None:
        raise CheckpointError(
            f"{name} has {K:,} inputs", f"a multiple of {_SMALLER[-1]}, the smallest group",
            f'give it group = "row" in a recipe file, or method = "none": match = "*{name[name.rfind("."):]}"',
        )  # fmt: skip
    return result


def _check_patterns(recipe: Recipe, linears: Mapping[str, tuple[int, ...]]) -> None:
    for pattern, _ in recipe.exceptions:
        if not any(fnmatchcase(name, pattern) for name in linears):
            if fnmatchcase(HEAD, pattern):
                raise ConfigError(
                    f'the recipe has layers for "{pattern}", and this model\'s head is its embedding: floats',
                    "a head of its own, or a name such as " + next(iter(linears), "none"), "leave it out",
                )  # fmt: skip
            raise ConfigError(
                f'the recipe has layers for "{pattern}", which no linear layer of this model matches',
                "a name such as " + next(iter(linears), "none"), "correct the pattern, or leave it out",
            )  # fmt: skip


def _specs(
    checkpoint: Checkpoint, layers: Mapping[str, tuple[LayerRecipe, TensorLayout]]
) -> dict[str, StoredTensorSpec]:
    result: dict[str, StoredTensorSpec] = {}
    for tensor, info in checkpoint.tensors.items():
        name = tensor.removesuffix(WEIGHT)
        if name in layers:
            N, K = info.shape
            result |= {f"{name}.{part}": spec for part, spec in layers[name][1].specs(N, K).items()}
        else:
            result[tensor] = StoredTensorSpec(kept_dtype(checkpoint, tensor), info.shape)
    return result


def kept_dtype(checkpoint: Checkpoint, tensor: str) -> str:
    """Return the stored dtype of an uncompressed tensor: its own; bfloat16 for integers, like the other tensors."""
    info = checkpoint.tensors[tensor]
    if isinstance(checkpoint, GgufCheckpoint) and len(info.shape) == 2:
        return "BF16"
    return NAMES[info.dtype]
