"""What is compiled: a model with its weights, from a checkpoint or from a user's Python code."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.tokenizer.tokenizer import Files
from millrace.checkpoint.weights.expert_names import stack_name
from millrace.checkpoint.weights.tied_head import EMBEDDING_WEIGHT, HEAD_WEIGHT
from millrace.compile.precision import PrecisionMap, StoredMatrix, joined_matrices, nearest_precisions
from millrace.engine.cache_specs import KV_CACHE_DTYPES, KvFormat
from millrace.errors import CheckpointError, ConfigError
from millrace.graph.types import Array, DType
from millrace.kernels.precision import Precision
from millrace.model.families import HEAD, build_model, parameter_of
from millrace.model.module import Module, Weights

C = TypeVar("C", bound=ModelConfig | EncoderConfig)
LONGEST = 1 << 24  # tokens: the limit of a program's parameters
DEFAULT_CONTEXT = 8192  # if the checkpoint allows more: rotary tables and the least KV memory depend on it
_AS_ARRAY = "numpy.asarray(weight, numpy.float32), or tensor.detach().float().numpy() of PyTorch's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A traceable model, its weights, and what else an engine needs."""

    module: Module
    weights: Weights
    max_context: int
    architecture: str
    vocab_size: int = 0  # number of token ids; 0: the model takes none, or the width of its logits
    dtype: str = "float32"  # "bfloat16" makes bf16 the default precision
    # For a checkpoint whose tensors have various types: how the linear layers, by name, and the embedding are stored.
    stored: Mapping[str, StoredMatrix] = field(default_factory=dict)
    stored_table: str | None = None
    kv_format: KvFormat | None = None  # the checkpoint's KV format; None: floats
    identity: Callable[[], str] = str  # digest of a checkpoint's whole content, which reads all of it
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    notes: tuple[str, ...] = ()
    files: Callable[[], Files] = dict  # copied into the engine: tokenizer, templates, ...

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, max_context: int | None = None) -> "Source":
        """Return the source of a checkpoint. raises ConfigError for a context beyond the model's"""
        config = with_context(checkpoint.config, max_context)
        tensors, own = checkpoint.tensors, checkpoint.own_precisions
        names = _parameters(tensors, config)
        shapes = {name: _shape(tensor, tensors[tensor].shape) for name, tensor in names.items()}
        weights = Weights(
            shapes, lambda name: tensors.load(names[name]).reshape(shapes[name]),
            lambda name, bits, group: tensors.stored(names[name], bits, group),
            formats={name: stored for name, tensor in names.items() if (stored := tensors.format(tensor))},
        )  # fmt: skip
        return cls(
            module=build_model(config), weights=weights, max_context=config.max_context, vocab_size=config.vocab_size,
            architecture=config.architecture, dtype=config.dtype, identity=checkpoint.identity,
            eos_token_ids=checkpoint.eos_token_ids, bos_token_id=checkpoint.bos_token_id,
            notes=(*checkpoint.notes, *_unused_note(tensors, config)), files=lambda: checkpoint.files,
            stored=_stored_matrices(checkpoint) if own else {},
            stored_table=tensors[EMBEDDING_WEIGHT].dtype if own else None,
            kv_format=KV_CACHE_DTYPES.get(tensors.kv or ""),
        )  # fmt: skip

    @classmethod
    def from_module(cls, module: Module, arrays: Mapping[str, Array], max_context: int = 0) -> "Source":
        """Return the source of a user's model with its weights by parameter name: `layers.0.up.weight` -> (N, K).

        max_context: tokens of its longest sequence; 0 for a network without sequences. raises ConfigError
        """
        bools = {name for name, p in module.parameters() if p.value.dtype == DType.BOOL}
        for name, array in arrays.items():
            refused = "cmMOSU" if name in bools else "bcmMOSU"
            if not isinstance(array, np.ndarray) or array.dtype.kind in refused:
                result = f"of {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(array).__qualname__}"
                raise ConfigError(f'the weight "{name}" is {result}', "NumPy arrays of numbers", _AS_ARRAY)
        weights = Weights({name: a.shape for name, a in arrays.items()}, lambda name: arrays[name], from_user=True)
        return cls(module=module, weights=weights, max_context=max_context, architecture=type(module).__name__)

    @property
    def own_precision(self) -> PrecisionMap:
        """The default precision of the model."""
        if self.stored:
            return nearest_precisions(self.stored)
        return PrecisionMap(Precision.BF16 if self.dtype == "bfloat16" else Precision.FP32)

    @property
    def n_parameters(self) -> int:
        total = 0
        for shape in self.weights.shapes.values():
            size = 1
            for d in shape:
                size *= d
            total += size
        return total


def with_context(config: C, max_context: int | None) -> C:
    """max_context: as requested; None: the default. raises ConfigError for a context beyond the model's"""
    usual, most = contexts(config)
    context = max_context or usual
    if not 1 <= context <= most:
        why = "the longest that an engine takes" if most == LONGEST else "for which the model was made"
        raise ConfigError(f"a context of {context} tokens", f"1 to {most}, {why}", "lower --max-context")
    return replace(config, max_context=context)


def contexts(config: ModelConfig | EncoderConfig) -> tuple[int, int]:
    """Return the default and the maximum context in tokens."""
    if isinstance(config, EncoderConfig):
        return config.max_context, min(config.max_positions, LONGEST)
    most = min(config.max_context, LONGEST)
    return min(most, DEFAULT_CONTEXT), most


def _shape(tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter: biases of the choice of experts may be stored as one row."""
    is_row = tensor.endswith("e_score_correction_bias") and len(shape) == 2 and shape[0] == 1
    return shape[1:] if is_row else shape


def _parameters(tensors: Iterable[str], config: ModelConfig | EncoderConfig) -> dict[str, str]:
    """Return the stored tensor of each parameter, by name."""
    result: dict[str, str] = {}
    for tensor in tensors:
        name = parameter_of(tensor, config)
        if name in result:
            raise CheckpointError(
                f"the checkpoint has {result[name]} and {tensor}", "one tensor for each parameter", "remove one of them"
            )
        if name is not None:
            result[name] = tensor
    return result


def _unused_note(tensors: Iterable[str], config: ModelConfig | EncoderConfig) -> tuple[str, ...]:
    """Return a note that names stored tensors the model does not use; a head that equals the embedding is used."""
    unused = [name for name in tensors if parameter_of(name, config) is None and name != HEAD_WEIGHT]
    if not unused:
        return ()
    shown = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
    return (f"{len(unused)} stored tensors are not used by {config.architecture}: {shown}",)


def _stored_matrices(checkpoint: Checkpoint) -> dict[str, StoredMatrix]:
    """Return the stored matrices by linear layer, of which experts have one for all.

    A tied head is the embedding; an embedding alone is in no matmul
    """
    result: dict[str, StoredMatrix] = {}
    tensors = checkpoint.tensors
    for name, info in tensors.items():
        layer = stack_name(name.removesuffix(".weight") + ".").removesuffix(".")
        if name == EMBEDDING_WEIGHT:
            if not checkpoint.decoder.tie_embeddings:
                continue
            layer = HEAD
        if len(info.shape) == 2:
            size, bits = math.prod(info.shape), tensors.activation_bits(name)
            matrix = StoredMatrix(
                info.dtype, size, tensors.format(name), byte_rows=bits == 8, fp8_rows=tensors.meets_fp8(name)
            )
            result[layer] = joined_matrices(result[layer], matrix) if layer in result else matrix
    return result
