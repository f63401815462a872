"""`millrace build`: a checkpoint becomes an engine folder; ends with what it will need."""

import json
import time
from pathlib import Path
from typing import Any

import click

from millrace.cli.options import json_option, made, settings_options
from millrace.cli.screen import count, heading, pairs, print_json, progress, size
from millrace.cli.signals import ended_in_order
from millrace.cli.tables import Tables, tuned
from millrace.compile.builder import build_engine
from millrace.compile.find import model_folder
from millrace.compile.settings import BuildSettings
from millrace.engine.manifest import MANIFEST
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.settings import read_given
from millrace.tune.pricing import pricing

EPILOG = """\b
Examples:
  millrace build tiny -o tiny.engine --precision w8a8
  millrace build ./llama-3.2-1b -o llama.engine --precision-map map.json --max-context 4096
  millrace build ./llama-3.2-1b-Q4_0.gguf -o llama.engine

\b
A map of precisions is JSON: the first pattern that matches a module's name decides, "default" the rest.
w8a8:32 has its activations in groups of 32, which divide those of the weights.
  {"default": "w4a8", "lm_head": "bf16", "layers.0.*": "w8a8:32"}"""


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("-o", "--output", type=Path, required=True, metavar="ENGINE", help="The folder to write; must not exist.")
@click.option("--precision-map", type=Path, metavar="FILE", help="Precisions per layer pattern, as JSON; see below.")
@settings_options(BuildSettings)
@json_option
@click.pass_obj
def command(env: Env, /, model: str, output: Path, precision_map: Path | None, as_json: bool, **given: Any) -> None:
    """Compile a checkpoint into an engine folder for this machine.

    MODEL is a checkpoint folder, a GGUF file, a hub id or `tiny`. The engine carries all that serving needs. The
    integers of a GGUF run as they are stored; what is rounded again is said.
    """
    started_s = time.perf_counter()
    build = made(BuildSettings, given)
    tables = _build(model, output, build, precision_map, env, quiet=as_json)
    seconds = time.perf_counter() - started_s
    if as_json:
        print_json({**tables.summary(), "seconds": seconds})
    else:
        show(tables, seconds)


def _build(model: str, output: Path, build: BuildSettings, map_file: Path | None, env: Env, *, quiet: bool) -> Tables:
    precisions = _read_map(map_file, build) if map_file else None
    with ended_in_order(), progress(quiet) as report:
        name, folder = model_folder(model, env, report)
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"{folder} is an engine already", "a checkpoint", "name the checkpoint it was built from")
        return Tables(build_engine(name, folder, output, build, env.cache, precisions, report, pricing))


_MAP_BYTES = 1 << 20


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError for a key that is there twice, of which one would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f'"{next(n for n in names if names.count(n) > 1):.80}" is there twice')
    return found


def _read_map(path: Path, build: BuildSettings) -> dict[str, str]:
    if build.precision is not None:
        raise ConfigError(
            "--precision and --precision-map are both given", "one of them", "put it into the map as default"
        )
    try:
        data = read_given(path, _MAP_BYTES)
        if len(data) > _MAP_BYTES:
            raise ConfigError(f"{path} has more than {_MAP_BYTES >> 20} MiB", "a map of precisions", "correct the file")
        asked = json.loads(data, object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "a JSON file", "see `millrace build --help`") from error
    if not isinstance(asked, dict) or not all(isinstance(v, str) for v in asked.values()):
        raise ConfigError(f"{path} is no map of names", 'an object like {"default": "w4a8"}', "correct the file")
    return asked


def show(tables: Tables, seconds: float) -> None:
    """The closing screen of a build."""
    m, memory = tables.engine.manifest, tables.memory()
    formats = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in tables.bytes_by_format().items())
    heading(f"{m.model_name}: built in {seconds:.1f} s")
    pairs(
        [
            ("engine", str(tables.engine.folder)),
            ("model", f"{m.architecture}, {count(m.n_parameters)} parameters, {tables.precision()}"),
            ("weights", f"{size(memory['weights_bytes'])} ({formats})"),
            ("KV cache", "none" if m.is_encoder else
                         f"{size(memory['kv_bytes_per_sequence'])} a sequence of {m.max_context:,} tokens "
                         f"({m.kv_format}), {size(memory['kv_bytes_batch'])} for {m.max_sequences}"),
            ("activations", f"{size(m.cpu.activation_bytes)} "
                            f"(no plan needs less than {size(m.cpu.activation_lower_bound)})"),
            ("peak memory", f"{size(memory['peak_bytes'])} with every sequence at full context"),
            ("program", f"{len(tables.calls)} calls for {len(tables.graph.nodes)} operations, "
                        f"{len(tables.fusions)} of them fused (millrace inspect shows them)"),
            ("tactics", tuned(tables)),
            ("price", m.evaluation.said),
            *(("note", text) for text in m.notes),
            ("next", f"millrace serve {tables.engine.folder}"),
        ]
    )  # fmt: skip
