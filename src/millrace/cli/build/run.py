"""Runs `millrace build`, whose options are in `options.py`: `--help` imports nothing else."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.build.output import Figures, show_traffic
from millrace.cli.console import heading, pairs, print_json, progress, size
from millrace.cli.engine_tables import Tables, tuning_text
from millrace.cli.options import make_settings
from millrace.cli.signals import raise_on_sigterm
from millrace.compile.builder import Builder
from millrace.compile.disk_space_check import check_new
from millrace.compile.lower_gpu.precision_check import check_gpu_has
from millrace.compile.resolve_model import model_folder
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import MANIFEST
from millrace.engine.cuda.device_lookup import CPU
from millrace.errors import ConfigError
from millrace.report.format_numbers import format_count
from millrace.settings import read_bounded, reject_duplicate_keys
from millrace.tune.engine_settings import ChosenSettings, choose_settings
from millrace.tune.precision_selector import precision_selector
from millrace.tune.settings import TrafficSettings


def run(
    ctx: click.Context, /, model: str, output: Path, precision_map: Path | None, device: str, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Run `millrace build`."""
    started_s = time.perf_counter()
    build, traffic = make_settings(BuildSettings, options), make_settings(TrafficSettings, options)
    precisions = _read_map(precision_map, build) if precision_map else None
    has_tune_flag = ctx.get_parameter_source("tune") is not ParameterSource.DEFAULT
    results, env = [], ctx.obj
    with raise_on_sigterm(), progress(as_json) as report:
        name, folder = model_folder(model, env, report)
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"{folder} is an engine already", "a checkpoint", "name the checkpoint it was built from")
        for_gpu = device != CPU
        if for_gpu:
            _check_traffic(traffic, device)
            check_gpu_has(device, folder, build, precisions)
            build = build if has_tune_flag or build.tune_rows else replace(build, tune=0)
        engines: list[tuple[Path, BuildSettings, ChosenSettings | None]] = [(output, build, None)]
        if traffic.traffic is not None:
            choices = choose_settings(folder, traffic, build, has_tune_flag=has_tune_flag)
            engines = [(_with_suffix(output, suffix), c.settings(build), c) for suffix, c in choices]
        for path, _, _ in engines:
            check_new(path)
        for path, settings, by in engines:
            checkpoint = Checkpoint.open(folder)
            Builder.from_settings(
                name, checkpoint, settings, env.cache, precisions, report, precision_selector, for_gpu=for_gpu
            ).write(path)  # fmt: skip
            engine = Engine.open(path)
            seconds, started_s = time.perf_counter() - started_s, time.perf_counter()
            results.append((Tables(engine), seconds, by))
    if as_json:
        summaries = [_summary(*one) for one in results]
        print_json(summaries[0] if len(summaries) == 1 else summaries)
    else:
        for one in results:
            show(*one, for_gpu=for_gpu)


def _check_traffic(traffic: TrafficSettings, device: str) -> None:
    """Refuse --traffic for a GPU: its choices use this CPU's kernels and memory. raises ConfigError"""
    if traffic.traffic is not None:
        raise ConfigError(
            f"--traffic is given, and --device is {device}", "one of them: traffic chooses sizes for a CPU",
            "leave one out",
        )  # fmt: skip


def _with_suffix(output: Path, suffix: str) -> Path:
    """Insert a suffix: tiny.engine with -day is tiny-day.engine."""
    return output.with_name(f"{output.stem}{suffix}{output.suffix}") if suffix else output


def _summary(tables: Tables, seconds: float, by: ChosenSettings | None) -> dict[str, Any]:
    traffic = {} if by is None else {"traffic": Figures.from_choices(by, tables).summary()}
    return {**tables.summary(), **traffic, "seconds": seconds}


_MAP_BYTES = 1 << 20


def _read_map(path: Path, build: BuildSettings) -> dict[str, str]:
    if build.precision is not None:
        raise ConfigError(
            "--precision and --precision-map are both given", "one of them", "put it into the map as default"
        )
    try:
        data = read_bounded(path, _MAP_BYTES)
        if len(data) > _MAP_BYTES:
            raise ConfigError(f"{path} has more than {_MAP_BYTES >> 20} MiB", "a map of precisions", "correct the file")
        precisions = json.loads(data, object_pairs_hook=reject_duplicate_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "a JSON file", "see `millrace build --help`") from error
    if not isinstance(precisions, dict) or not all(isinstance(v, str) for v in precisions.values()):
        raise ConfigError(f"{path} is no map of names", 'an object like {"default": "w4a8"}', "correct the file")
    return precisions


def show(tables: Tables, seconds: float, by: ChosenSettings | None = None, *, for_gpu: bool = False) -> None:
    """Print the summary of a build."""
    figures = None if by is None else Figures.from_choices(by, tables)
    if figures is not None:
        show_traffic(figures)
    serve = (
        f"millrace serve {tables.engine.folder}" + (f" {figures.flag}" if figures else "") + " --device cuda" * for_gpu
    )
    m, memory = tables.engine.manifest, tables.memory()
    formats = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in tables.bytes_by_format().items())
    heading(f"{m.model_name}: built in {seconds:.1f} s")
    pairs(
        [
            ("engine", str(tables.engine.folder)),
            ("model", f"{m.architecture}, {format_count(m.n_parameters)} parameters, {tables.precision()}"),
            ("weights", f"{size(memory['weights_bytes'])} ({formats})"),
            ("KV cache", "none" if m.is_encoder else
                         f"{size(memory['kv_bytes_per_sequence'])} a sequence of {m.max_context:,} tokens "
                         f"({m.kv_format}), {size(memory['kv_bytes_batch'])} for {m.max_sequences}"),
            ("activations", f"{size(m.cpu.activation_bytes)} "
                            f"(no plan needs less than {size(m.cpu.activation_lower_bound)})"),
            ("peak memory", f"{size(memory['peak_bytes'])} with every sequence at full context"),
            ("program", f"{len(tables.calls)} calls for {len(tables.graph.nodes)} operations, "
                        f"{len(tables.fusions)} of them fused (millrace inspect shows them)"),
            ("tactics", tuning_text(tables)),
            ("accuracy", m.evaluation.summary),
            *(("note", text) for text in m.notes),
            ("next", serve),
        ]
    )  # fmt: skip
