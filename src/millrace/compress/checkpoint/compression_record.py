"""compression.json: what was done to a folder and what it costs, beside the weights; and the same as a page for people.

compression.json   written with the folder; what is measured afterwards is added, whole or not at all
compression.html   made of the JSON alone (page.html here), anew with each change
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from millrace.compress.measure.accuracy import Loss
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics
from millrace.compress.measure.speed import Speeds
from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError, MachineError
from millrace.settings import read_given

RECORD = "compression.json"
FORMAT = 1
_MOST_BYTES = 64 << 20


class Applied(msgspec.Struct, frozen=True):
    """How a layer was compressed; group: 0 for a whole row. The words are a recipe's."""

    method: str
    bits: int
    group: int = 0
    smooth: str = "none"
    search: str = "none"
    minimums: bool = False


class Flips(msgspec.Struct, frozen=True, kw_only=True):
    """Multiple-choice questions, answered by the source and by what was made of it.

    right, interval: of each a count, and 95 % of the share; became_right, became_wrong, chose_otherwise: questions;
    difference, its interval, p_value: as `evaluate.paired.Paired`; digest: of the questions and how they are posed, ""
    in records from before it was kept
    """

    task: str
    questions: Annotated[int, msgspec.Meta(ge=1)]
    source_precision: str
    made_precision: str
    source_right: int
    made_right: int
    source_interval: tuple[float, float]
    made_interval: tuple[float, float]
    became_right: int
    became_wrong: int
    chose_otherwise: int
    difference: float
    interval: tuple[float, float]
    p_value: float
    digest: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is not there was not done, or is of an earlier version. What else is there is left alone.

    model: the source's identity; command: that made it; commands: by "loss", "speed" and "mmlu" those that measured it;
    errors: share that each layer lost, forms: what was applied to it, figures: why it lost that; loss: as
    `measure.Loss`, or `not_measured` and why; speed: as `speed.Speeds`
    """

    format: int
    source: str
    recipe: dict[str, Any]
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    millrace: str = ""
    model: str = ""
    command: str = ""
    commands: dict[str, str] = {}
    notes: list[str] = []
    errors: dict[str, float] = {}
    forms: dict[str, Applied] = {}
    figures: dict[str, LayerDiagnostics] = {}
    statistics: dict[str, str | int] = {}
    seconds: float | None = None
    loss: dict[str, Any] = {}
    speed: Speeds | None = None
    mmlu: Flips | None = None

    @property
    def measured(self) -> Loss | None:
        return msgspec.convert(self.loss, Loss) if "kl" in self.loss else None


def read_record(folder: Path) -> Record:
    """raises ConfigError for a folder that has none, and for one that is damaged or newer"""
    path = folder / RECORD
    expected, mend = "a folder that `millrace compress` made", "name one, or make it: millrace compress MODEL -o FOLDER"
    try:
        result = msgspec.json.decode(read_given(path, _MOST_BYTES), type=Record)
        _ = result.measured
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", expected, mend) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}", expected, "compress the model again") from error
    if result.format != FORMAT:
        raise ConfigError(f"{path} is of format {result.format}", f"format {FORMAT}", "compress the model again")
    return result


def write_record(folder: Path, content: Mapping[str, Any]) -> None:
    """A new one."""
    _write(folder, {"format": FORMAT, **content})


def add_to_record(folder: Path, more: Mapping[str, Any]) -> None:
    """What was found since takes the place of what was there under the same names. raises as `read_record`"""
    read_record(folder)  # a record, and of this format
    _write(folder, {**json.loads(read_given(folder / RECORD, _MOST_BYTES)), **more})


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    """raises MachineError for figures that JSON has no words for; what is there stays"""
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        mend = "leave out of the recipe what overflows, or look at the source: its weights or statistics may be damaged"
        raise MachineError(f"a figure of {folder / RECORD} is not finite", "finite numbers", mend) from error
    write_whole(folder / RECORD, (text + "\n").encode())
