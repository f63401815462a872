"""compression.json: records how a folder was compressed and what that costs; also as an HTML page.

compression.json   written with the folder; later measurements are added atomically
compression.html   generated from the JSON only (page.html here), again with each change
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
from millrace.settings import read_bounded

RECORD = "compression.json"
FORMAT = 1
_MAX_BYTES = 64 << 20


class AppliedMethod(msgspec.Struct, frozen=True):
    """How a layer was compressed, in terms of a recipe; group: 0 for a whole row."""

    method: str
    bits: int
    group: int = 0
    smooth: str = "none"
    search: str = "none"
    minimums: bool = False


class AnswerChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Multiple-choice questions answered by the source and by the compressed checkpoint.

    right, interval: each one's count, and 95 % interval of the share; became_right, became_wrong, chose_otherwise:
        numbers of questions that changed
    difference, its interval, p_value: as `evaluate.paired.Paired`; digest: of the questions and how they are posed, ""
        in older records
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
    """A record. Missing keys were not measured, or the record is of an earlier version. Unknown keys are kept.

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
    forms: dict[str, AppliedMethod] = {}
    figures: dict[str, LayerDiagnostics] = {}
    statistics: dict[str, str | int] = {}
    seconds: float | None = None
    loss: dict[str, Any] = {}
    speed: Speeds | None = None
    mmlu: AnswerChanges | None = None

    @property
    def measured(self) -> Loss | None:
        return msgspec.convert(self.loss, Loss) if "kl" in self.loss else None


def read_record(folder: Path) -> Record:
    """Read a folder's record. raises ConfigError if it is missing, damaged or newer"""
    path = folder / RECORD
    expected, fix = "a folder that `millrace compress` made", "name one, or make it: millrace compress MODEL -o FOLDER"
    try:
        result = msgspec.json.decode(read_bounded(path, _MAX_BYTES), type=Record)
        _ = result.measured
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", expected, fix) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}", expected, "compress the model again") from error
    if result.format != FORMAT:
        raise ConfigError(f"{path} is of format {result.format}", f"format {FORMAT}", "compress the model again")
    return result


def write_record(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a new record."""
    _write(folder, {"format": FORMAT, **content})


def add_to_record(folder: Path, more: Mapping[str, Any]) -> None:
    """Add later measurements, replacing values of the same names. raises as `read_record`"""
    read_record(folder)  # check that it is a record of this format
    _write(folder, {**json.loads(read_bounded(folder / RECORD, _MAX_BYTES)), **more})


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the JSON and the page. raises MachineError if JSON cannot represent a value; old files then stay"""
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        fix = "leave out of the recipe what overflows, or look at the source: its weights or statistics may be damaged"
        raise MachineError(f"a figure of {folder / RECORD} is not finite", "finite numbers", fix) from error
    write_whole(folder / RECORD, (text + "\n").encode())
