"""MODEL as the commands open it: with progress on stderr, and notes said aloud."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli.screen import Progress, note, progress
from millrace.cli.signals import ended_in_order
from millrace.compile.cache import EngineCache
from millrace.engine.engine import Engine
from millrace.env import Env
from millrace.errors import EngineError
from millrace.runtime.open import BuildSettings, Opened, RunSettings, build_options, find_engine, open_engine

if TYPE_CHECKING:
    from millrace.compile.tune import Tuning


def engine_of(model: str, build: BuildSettings, env: Env, *, quiet: bool = False) -> tuple[str, Engine]:
    """Name and engine of MODEL, downloaded and built where needed. quiet: without progress"""
    with ended_in_order(), progress(quiet) as report:
        return find_engine(model, build, env, progress=report, say=lambda text: note(f"note: {text}"))


@contextmanager
def opened(
    model: str, build: BuildSettings, run: RunSettings, env: Env, *, sequences: int | None = None, quiet: bool = False
) -> Iterator[Opened]:
    """MODEL, ready to run; closed at the end. sequences: how many there will be at a time, where that is known"""
    with _cache_mended(env):
        name, engine = engine_of(model, build, env, quiet=quiet)
        model_opened = open_engine(name, engine, run, sequences)
    try:
        yield model_opened
    finally:
        model_opened.close()


@contextmanager
def _cache_mended(env: Env) -> Iterator[None]:
    """A damaged engine in the cache was not put there by the user: say how to be rid of it."""
    try:
        yield
    except EngineError as error:
        damaged = [e.name for e in EngineCache(env.cache).entries() if error.what.startswith(str(e.folder))]
        if not damaged:
            raise
        raise EngineError(error.what, error.expected, f"millrace rm {damaged[0]}, and ask again") from error


def build_engine(
    name: str, checkpoint: Path, output: Path, build: BuildSettings, precisions: Mapping[str, str] | None = None,
    report: Progress | None = None, tuning: "Tuning | None" = None,
) -> Engine:  # fmt: skip
    """Compiles a checkpoint (folder or GGUF file) into the new folder `output`. `precisions`: by layer patterns."""
    from millrace.checkpoint.checkpoint import Checkpoint  # the compiler is not needed for a built engine
    from millrace.compile.build import plan_engine, write_engine
    from millrace.compile.source import Source

    opened = Checkpoint.open(checkpoint)
    if checkpoint.is_file():  # a GGUF holds its tokenizer; a folder may be built without one
        _ = opened.tokenizer
    source = Source.from_checkpoint(opened, build.max_context)
    options = build_options(build, source.own_precision, precisions)
    write_engine(source, plan_engine(source, options), output, name=name, progress=report, tuning=tuning)
    return Engine.open(output)
