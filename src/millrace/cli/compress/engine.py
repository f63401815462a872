"""`millrace compress --engine`: what was made becomes an engine at once, as `millrace build` makes one unasked."""

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
from millrace.tune.accuracy_pricing import pricing


@dataclass(frozen=True, slots=True)
class Built:
    """seconds: that the build took"""

    tables: Tables
    seconds: float

    def summary(self) -> dict[str, Any]:
        return {**self.tables.summary(), "seconds": self.seconds}

    def show(self) -> None:
        show(self.tables, self.seconds)


def check_engine(engine: Path | None, out: Path) -> None:
    """Before anything is made. raises EngineError for a folder that is there, ConfigError for one within the other"""
    if engine is None:
        return
    check_new(engine)
    made, place = out.resolve(), engine.resolve()
    if made == place or made in place.parents or place in made.parents:
        raise ConfigError(f"--engine {engine} and -o {out} are one in the other", "two folders", "name another")


def built(asked: CompressOptions) -> Built | None:
    """Of the folder that was made. None where no engine was asked for"""
    if asked.engine is None:
        return None
    started_s = time.perf_counter()
    with raise_on_sigterm(), progress(asked.as_json) as report:
        engine = build_engine(
            asked.output.name, asked.output, asked.engine, BuildSettings(), asked.env.cache, None, report, pricing
        )
    return Built(Tables(engine), time.perf_counter() - started_s)
