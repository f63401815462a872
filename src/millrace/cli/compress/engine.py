"""`millrace compress --engine`: builds an engine from the result with the defaults of `millrace build`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.cli.build.run import show
from millrace.cli.compress.request import CompressOptions
from millrace.cli.console import progress
from millrace.cli.engine_tables import Tables
from millrace.cli.signals import raise_on_sigterm
from millrace.compile.builder import build_engine
from millrace.compile.disk_space_check import check_new
from millrace.compile.settings import BuildSettings
from millrace.errors import ConfigError
from millrace.tune.precision_selector import precision_selector


@dataclass(frozen=True, slots=True)
class Built:
    """A built engine. seconds: build time"""

    tables: Tables
    seconds: float

    def summary(self) -> dict[str, Any]:
        return {**self.tables.summary(), "seconds": self.seconds}

    def show(self) -> None:
        show(self.tables, self.seconds)


def check_engine(engine: Path | None, out: Path) -> None:
    """Check the engine folder. raises EngineError if it exists, ConfigError if one folder is inside the other"""
    if engine is None:
        return
    check_new(engine)
    out_folder, place = out.resolve(), engine.resolve()
    if out_folder == place or out_folder in place.parents or place in out_folder.parents:
        raise ConfigError(f"--engine {engine} and -o {out} are one in the other", "two folders", "name another")


def build_output(options: CompressOptions) -> Built | None:
    """Build an engine from the output; None if not requested."""
    if options.engine is None:
        return None
    started_s = time.perf_counter()
    with raise_on_sigterm(), progress(options.as_json) as report:
        engine = build_engine(
            options.output.name,
            options.output,
            options.engine,
            BuildSettings(),
            options.env.cache,
            None,
            report,
            precision_selector,
        )
    return Built(Tables(engine), time.perf_counter() - started_s)
