"""Opens MODEL for commands, with progress and notes on stderr."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from millrace.cli.console import note, progress
from millrace.cli.signals import raise_on_sigterm
from millrace.compile.cache.engine_cache import EngineCache
from millrace.compile.resolve_model import find_engine
from millrace.compile.settings import BuildSettings
from millrace.engine.artifact.engine import Engine
from millrace.engine.cuda.device_lookup import ON_CPU, DeviceId
from millrace.env import Env
from millrace.errors import EngineError
from millrace.runtime.open_engine import OpenedEncoder, RunningModel, open_any, open_engine
from millrace.runtime.settings import RunSettings
from millrace.tune.precision_selector import precision_selector


def engine_of(
    model: str, build: BuildSettings, env: Env, *, quiet: bool = False, place: DeviceId = ON_CPU
) -> tuple[str, Engine]:  # fmt: skip
    """Return name and engine of MODEL, downloaded and built if needed. quiet: no progress"""
    with raise_on_sigterm(), progress(quiet) as report:
        return find_engine(
            model, build, env, progress=report, say=lambda text: note(f"note: {text}"),
            new_selector=precision_selector, place=place,
        )  # fmt: skip


@contextmanager
def opened(
    model: str, build: BuildSettings, run: RunSettings, env: Env, *, sequences: int | None = None, quiet: bool = False,
    one_table: bool = False,
) -> Iterator[RunningModel]:  # fmt: skip
    """Open a language model, and close it at the end.

    sequences: number of concurrent sequences, if known; one_table: see `open_engine`
    raises EngineError if MODEL is not a language model
    """
    with _with_cache_hint(env):
        name, engine = engine_of(model, build, env, quiet=quiet, place=run.place)
        model_opened = open_engine(name, engine, run, sequences, one_table=one_table)
    with closing(model_opened):
        yield model_opened


@contextmanager
def opened_to_serve(
    model: str, build: BuildSettings, run: RunSettings, env: Env, *, quiet: bool = False
) -> Iterator[RunningModel | OpenedEncoder]:
    """Open MODEL, a language model or an encoder, and close it at the end."""
    with _with_cache_hint(env):
        name, engine = engine_of(model, build, env, quiet=quiet, place=run.place)
        model_opened = open_any(name, engine, run)
    with closing(model_opened):
        yield model_opened


@contextmanager
def _with_cache_hint(env: Env) -> Iterator[None]:
    """Name the command that removes a damaged engine from the cache, in the error about it."""
    try:
        yield
    except EngineError as error:
        damaged = [e.name for e in EngineCache(env.cache).entries() if error.what.startswith(str(e.folder))]
        if not damaged:
            raise
        raise EngineError(error.what, error.expected, f"millrace rm {damaged[0]}, and ask again") from error
