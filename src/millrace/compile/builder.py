"""The builder of engines: from a checkpoint and build settings to an engine, in a user's folder or the cache.

Imported only if there is no engine yet: running a built engine needs no compiler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.compile.build import DEFAULT_BATCH, BuildOptions, plan_engine, resolve_options, write_engine
from millrace.compile.cache.file_digests import checkpoint_identity
from millrace.compile.cache.timing_cache import TimingCache
from millrace.compile.disk_space_check import check_new, check_room
from millrace.compile.lower_gpu.precision import GpuPrecision, gpu_precision
from millrace.compile.precision import PrecisionMap, precision_map
from millrace.compile.precision_selection import (
    AUTO,
    AccuracyQuery,
    PrecisionTask,
    SelectorFactory,
    check_measured,
    to_measure,
)
from millrace.compile.settings import BuildSettings, Progress
from millrace.compile.source import Source
from millrace.compile.tune.tuner import Tuning
from millrace.compile.tune.tuning_cases import USUAL_ROWS, TunedRows
from millrace.engine.artifact.accuracy_loss import Evaluation
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import FORMAT
from millrace.engine.cache_specs import KV_CACHE_DTYPES
from millrace.errors import ConfigError
from millrace.kernels.kernels_digest import kernels_digest
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import Precision
from millrace.model.families import HEAD
from millrace.settings import flag_of


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A checkpoint, with everything that determines its engine.

    cache: folder of the cached digests and timings; None: all is read and timed again
    measure: the measurements of its precision before the build
    alone: its precision on a GPU, if that differs from a CPU's
    """

    name: str
    checkpoint: Checkpoint
    source: Source
    options: BuildOptions
    measure: PrecisionTask
    alone: GpuPrecision
    tuning: Tuning | None
    cache: Path | None
    progress: Progress | None

    @classmethod
    def from_settings(
        cls, name: str, checkpoint: Checkpoint, build: BuildSettings, cache: Path | None,
        precisions: Mapping[str, str] | None = None, progress: Progress | None = None,
        new_selector: SelectorFactory | None = None, *, for_gpu: bool = False,
    ) -> "Builder":  # fmt: skip
        """Resolve the settings. precisions: a map by layer patterns, in place of `build.precision`;
        new_selector: creates what measures losses

        for_gpu: `build.precision` may be a GPU-only one; the engine then runs in its substitute on a CPU
        raises ConfigError for invalid settings
        """
        source = Source.from_checkpoint(checkpoint, build.max_context)
        kv_format = KV_CACHE_DTYPES[build.kv_cache_dtype] if build.kv_cache_dtype else None
        if for_gpu:
            alone, build = gpu_precision(build, source, precisions)
            if alone.built:
                build = replace(build, precision=alone.built.value)
            if alone.name == "fp16" and kv_format is None:  # float32 on a CPU, which keeps them so unless it is asked
                kv_format = source.kv_format
        precision = requested_precision(build, source.own_precision, precisions)
        if for_gpu:
            alone.check_built((precision or source.own_precision).described(HEAD))
        else:
            alone, _ = gpu_precision(build, source, precisions)
        encoder = isinstance(checkpoint.config, EncoderConfig)
        if encoder:
            check_encoder(build, precision, alone)
        options = BuildOptions(
            precision=precision,
            max_batch=build.max_batch or (ENCODER_BATCH if encoder else DEFAULT_BATCH),
            kv_format=kv_format,
            tiles=build.bf16_sums == "tiles" if build.bf16_sums else "amx" in usable_isas(),
        )
        measure = to_measure(build, checkpoint, source, options, new_selector)
        check_measured(build, measure)
        timings = None if cache is None else TimingCache(cache / "timings.json")
        rows = _rows(build, options, source.max_context)
        tuning = Tuning(build.tune, cache=timings, rows=rows) if build.tune else None
        return cls(
            name=name, checkpoint=checkpoint, source=source, options=options, measure=measure, alone=alone,
            tuning=tuning, cache=cache, progress=progress,
        )  # fmt: skip

    @cached_property
    def identity(self) -> str:
        """Digest of the checkpoint's whole content, which is read for it. raises CheckpointError"""
        return checkpoint_identity(self.checkpoint, self.cache, self.progress)

    @property
    def key(self) -> str:
        """Equal for equal engines, whatever the settings.

        The tuning time is not part of it: it changes no answer, and `millrace tune` can repeat it.
        """
        requested = [replace(self.options, precision=p) for p in self.measure.candidates] or [self.options]
        keys = " ".join(resolve_options(self.source, options).key for options in requested)
        return f"{FORMAT} {kernels_digest()} {self.identity} {keys} {self.measure.key} {self.alone.name}"

    def write(self, folder: Path) -> None:
        """Write the engine into a new folder, completely or not at all.

        raises CheckpointError, ConfigError, MachineError
        """
        check_new(folder)  # before anything slow
        if self.checkpoint.has_tokenizer:
            _ = self.checkpoint.tokenizer  # fail on a broken tokenizer, without which an engine is useless
        source = replace(self.source, identity=lambda: self.identity)
        options, evaluation = self._measured(folder)
        plan = plan_engine(source, options)
        plan = replace(plan, gpu=self.alone.section(source, plan.traced, plan.precision))
        write_engine(
            source, plan, folder, name=self.name, progress=self.progress, tuning=self.tuning,
            evaluation=evaluation,
        )  # fmt: skip

    def _measured(self, folder: Path) -> tuple[BuildOptions, Evaluation]:
        """Return the options with the chosen precision, and its accuracy loss."""
        if self.measure.selector is None:
            return self.options, Evaluation(self.measure.without)
        first = replace(self.options, precision=self.measure.candidates[0])
        check_room(folder, plan_engine(self.source, first).program.weights_bytes)  # report mistakes early
        query = AccuracyQuery(
            source=self.source, tokenizer=self.checkpoint.tokenizer,
            options=replace(self.options, tiles=self.measure.tiles), candidates=self.measure.candidates,
            max_kl=self.measure.max_kl, progress=self.progress or (lambda *_: None),
        )  # fmt: skip
        precision, evaluation = self.measure.selector.select(query)
        return replace(self.options, precision=precision), evaluation


def build_engine(
    name: str, checkpoint: Path, folder: Path, build: BuildSettings, cache: Path | None = None,
    precisions: Mapping[str, str] | None = None, progress: Progress | None = None,
    new_selector: SelectorFactory | None = None,
) -> Engine:  # fmt: skip
    """Compile a checkpoint (folder or GGUF file) into `folder`, which must not exist. Arguments as in Builder."""
    Builder.from_settings(name, Checkpoint.open(checkpoint), build, cache, precisions, progress, new_selector).write(
        folder
    )
    return Engine.open(folder)


ENCODER_BATCH = 64  # each text has its own KV pages, so room for many short ones is expensive
# Precisions measured for encoders against transformers on a real model (tests/compile/test_minilm.py).
ENCODER_PRECISIONS = (Precision.FP32, Precision.BF16, Precision.W8A8)


def check_encoder(build: BuildSettings, precision: PrecisionMap | None, alone: GpuPrecision) -> None:
    """Check for settings that only decoders have, and precisions that are not measured. raises ConfigError"""
    if alone.name == "fp8":
        expected = f"one of {', '.join((*ENCODER_PRECISIONS, 'fp16', 'tf32'))}"
        raise ConfigError("precision fp8 is not measured for encoders", expected, "choose one of them")
    lacks = {
        "head": "it has no head",
        "kv_cache_dtype": "it keeps no keys and values",
        "tune_rows": "it answers nothing",
    }
    for name, what in lacks.items():
        if getattr(build, name) is not None:
            raise ConfigError(f"{flag_of(name)} is given for an encoder", f"nothing: {what}", "leave it out")
    used = {precision.default, *(p for _, p in precision.patterns)} if precision else set()
    for other in sorted(used - {*ENCODER_PRECISIONS}):
        raise ConfigError(
            f"precision {other} is not measured for encoders", "one of " + ", ".join(ENCODER_PRECISIONS),
            "choose one of these: w8a8 is the smallest",
        )  # fmt: skip


def _rows(build: BuildSettings, options: BuildOptions, context: int) -> TunedRows:
    """Parse the rows to tune. raises ConfigError"""
    if build.tune_rows is None:
        return USUAL_ROWS
    return TunedRows.parse(build.tune_rows, options.max_batch, min(options.max_step_tokens, context))


def requested_precision(
    build: BuildSettings, own: PrecisionMap, precisions: Mapping[str, str] | None = None
) -> PrecisionMap | None:
    """Return the requested precision, from `precisions` or `build.precision`; None: the model's own.

    Groups are `build.group` or the model's own. If the precision is to be measured, this is the start: the model's own.
    """
    requested = precisions if precisions is not None else None if build.precision == AUTO else build.precision
    if requested is None and (build.group is not None or build.head is not None):
        kv_format = [(pattern, p) for pattern, p in own.patterns if not build.head or pattern != HEAD]
        requested = {"default": own.default.value, **{pattern: p.value for pattern, p in kv_format}}
    if requested is None:
        return None
    as_stored = own.stored_groups and build.group is None
    return precision_map(requested, build.group or own.group, build.head, stored_groups=as_stored)
