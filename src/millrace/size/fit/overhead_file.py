"""File format of a serving stack fitted to the user's runs, for one device and precision."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from millrace.engine.artifact.tactics import write_whole
from millrace.errors import ConfigError, nearest, sanitize
from millrace.settings import read_bounded, reject_duplicate_keys
from millrace.size.money.prices import number
from millrace.size.performance.serving_overhead import Stack

_VERSION, _MAX_BYTES = 1, 1 << 20
_NUMBERS = {f.name: f.type for f in fields(Stack) if f.name != "name"}


@dataclass(frozen=True, slots=True)
class FittedStack:
    """A fitted stack. error: mean relative error of requests/s after the fit"""

    device: str
    precision: str
    stack: Stack
    error: float

    def stack_for(self, device: str, precision: str) -> Stack | None:
        return self.stack if (device, precision) == (self.device, self.precision) else None


def write_stack(file: Path, own: FittedStack) -> None:
    """Write a stack. raises OSError"""
    document = {"version": _VERSION, "device": own.device, "precision": own.precision, "error": own.error,
            "stack": asdict(own.stack)}  # fmt: skip
    write_whole(file, (json.dumps(document, indent=2) + "\n").encode())


def read_stack(file: Path) -> FittedStack:
    """Read and check a stack. raises ConfigError"""
    expected = "what `millrace size fit -o` wrote"
    try:
        data = read_bounded(file, _MAX_BYTES)
        document: Any = json.loads(data, object_pairs_hook=reject_duplicate_keys) if len(data) <= _MAX_BYTES else None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", expected, "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {sanitize(str(error))}", expected, "fit again") from None
    if (
        not isinstance(document, dict)
        or document.get("version") != _VERSION
        or not isinstance(document.get("stack"), dict)
    ):
        raise ConfigError(f"{file} holds no stack of version {_VERSION}", expected, "fit again")
    values = document["stack"]
    for name in values:
        if name != "name" and name not in _NUMBERS:
            raise ConfigError(f"{file}: stack has {name!r:.60}", nearest(name, _NUMBERS), "fit again")
    numbers = {name: number(values.get(name), f"{file}: {name}", "fit again") for name in _NUMBERS}
    for name in ("step_tokens", "sequences"):
        numbers[name] = int(numbers[name])
    texts = [document.get("device"), document.get("precision"), values.get("name")]
    if not all(isinstance(text, str) and len(text) <= 200 for text in texts):
        raise ConfigError(f"{file}: names are {texts!r:.120}", "device, precision and the stack's name", "fit again")
    device, precision, name = (sanitize(text) for text in texts)
    off = number(document.get("error"), f"{file}: error", "fit again")
    return FittedStack(device, precision, Stack(name=name, **numbers), off)  # type: ignore[arg-type]
