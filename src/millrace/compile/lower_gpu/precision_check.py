"""Check for `millrace build --device`: whether that GPU has the layers and precisions that a start will need."""

from collections.abc import Mapping
from pathlib import Path

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.compile.build import BuildOptions, resolve_options
from millrace.compile.builder import requested_precision
from millrace.compile.lower_gpu.precision import gpu_precision
from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.engine.cache_specs import KV_CACHE_DTYPES, KvFormat
from millrace.engine.cuda.device_lookup import known_gpu
from millrace.engine.cuda.precision_support import check_keeps, multiplied_by
from millrace.errors import EngineError
from millrace.machine.devices import check_architecture
from millrace.model.families import HEAD


def check_gpu_has(device: str, folder: Path, build: BuildSettings, precisions: Mapping[str, str] | None = None) -> None:
    """Check the GPU. raises ConfigError, EngineError if it lacks something, MachineError if there is no GPU here"""
    gpu = known_gpu(device)
    check_architecture(gpu.about, gpu.architecture, _needed(folder, build, precisions))


def _check_layers(config: ModelConfig | EncoderConfig) -> None:
    """Check that there are GPU kernels for all layers. raises EngineError"""
    if isinstance(config, EncoderConfig):
        lacking = "biases by distance" if config.distance_buckets else ""
    else:
        lacking = "mixtures of experts" if config.experts else "attention sinks" if config.attention_sinks else ""
    if lacking:
        raise EngineError(f"{lacking} of this model on a GPU", "a model without them", "build it for the CPU")


def _needed(folder: Path, build: BuildSettings, precisions: Mapping[str, str] | None) -> list[str]:
    """Return what a GPU must multiply for these precisions, or by default for the checkpoint's."""
    checkpoint = Checkpoint.open(folder)
    _check_layers(checkpoint.config)
    source = Source.from_checkpoint(checkpoint, build.max_context)
    kv = KV_CACHE_DTYPES[build.kv_cache_dtype] if build.kv_cache_dtype else None
    alone, build = gpu_precision(build, source, precisions)
    alone.check_kept(build.kv_cache_dtype)
    requested = requested_precision(build, source.own_precision, precisions)
    chosen = resolve_options(source, BuildOptions(precision=requested, kv_format=kv))
    check_keeps(None if chosen.kv_format == KvFormat[chosen.table.upper()] else chosen.kv_format)
    dtype = alone.floats(chosen.table)
    region_precision = chosen.precision
    used = (
        region_precision.default,
        region_precision.precision_of(HEAD, is_head=True),
        *(p for _, p in region_precision.patterns),
    )
    meets_fp8 = alone.name == "fp8"
    needed = [name for precision in used for name in multiplied_by(precision, dtype, meets_fp8=meets_fp8)]
    return [*needed, "fp8"] if chosen.kv_format == KvFormat.FP8 else needed
