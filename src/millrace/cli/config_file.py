"""`--config FILE`: flags of a command in YAML, as `vllm serve --config` takes them.

    model: ./llama-3.2-1b
    port: 9000
    served-model-name: [chat, chat-large]
    prefix-cache: false

Flags on the command line go before those of the file, which go before the defaults.
"""

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from millrace.cli.flag_aliases import hint
from millrace.cli.options import GroupedOption
from millrace.errors import ConfigError
from millrace.settings import check_value, read_bounded, reject_duplicate_keys

_MAX_BYTES = 1 << 20
_EXPECTED = "YAML with one flag a line, like `port: 9000`"
_LISTED = 10  # mistakes of a file that an error lists
_NUMBERS = {"integer": "a whole number", "float": "a number"}


@dataclass(frozen=True, slots=True)
class _KeyEntry:
    """A key of the file with its value. error: why the value cannot be read"""

    line: int
    key: object
    value: object
    error: str = ""

    @property
    def name(self) -> str:
        return self.key[:60] if isinstance(self.key, str) else reprlib.repr(self.key)


@dataclass(frozen=True, slots=True)
class _Mistake:
    line: int
    what: str
    expected: str
    fix: str


def config_option(command: click.Command) -> click.Command:
    """Give a command the option --config."""
    help_text = "YAML file with flags of this command, like `port: 9000`; those on the command line go first."
    option = click.Option(
        ["--config"], metavar="FILE", help=help_text, is_eager=True, expose_value=False, callback=_use_file
    )
    command.params.insert(0, option)
    return command


def _use_file(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.default_map = {**(ctx.default_map or {}), **read_config_file(Path(value), ctx.command)}


def read_config_file(file: Path, command: click.Command) -> dict[str, Any]:
    """Return the values of a command's parameters by their Python names. raises ConfigError with all mistakes"""
    params = {_key(opt): (p, opt) for p in command.params for opt in (*p.opts, *p.secondary_opts) if len(opt) > 2}
    flags = [f"--{name}" for name, (p, _) in params.items() if isinstance(p, click.Option) and not p.is_eager]
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    mistakes: list[_Mistake] = []
    for entry in _read(file):
        param, opt = params.get(_key(entry.name), (None, ""))
        if param is None or param.is_eager or param.name is None:
            value = entry.value if isinstance(entry.value, str | int | float) else None
            expected, fix = hint(f"--{_key(entry.name)}", None if value is None else str(value), flags)
            message = f"there is no flag for the key {entry.name!r}"
            mistakes.append(_Mistake(entry.line, message, expected, fix or "correct the key"))
            continue
        if param.name in lines:
            message = f"{entry.name} sets {opt} again, which line {lines[param.name]} sets"
            mistakes.append(_Mistake(entry.line, message, "each flag once, not twice", "remove one of the lines"))
            continue
        lines[param.name] = entry.line
        if entry.error:
            mistakes.append(_Mistake(entry.line, f"{entry.name}: {entry.error}", "a value in YAML", "quote the value"))
        elif entry.value is not None:
            wrong, values[param.name] = _check_value(entry, param, opt)
            mistakes += wrong
    if mistakes:
        raise _error(file, mistakes)
    return values


def _error(file: Path, mistakes: list[_Mistake]) -> ConfigError:
    if len(mistakes) == 1:
        (mistake,) = mistakes
        return ConfigError(f"{file}:{mistake.line}: {mistake.what}", mistake.expected, mistake.fix)
    shown = mistakes[:_LISTED]
    more = f"; and {len(mistakes) - len(shown)} more" if len(mistakes) > len(shown) else ""
    return ConfigError(
        f"{file} has {len(mistakes)} mistakes: " + "; ".join(f"line {m.line}: {m.what}" for m in shown) + more,
        "; ".join(f"line {m.line}: {m.expected}" for m in shown),
        "; ".join(f"line {m.line}: {m.fix}" for m in shown),
    )


def _key(name: str) -> str:
    return name.removeprefix("--").replace("_", "-").lower()


def _read(file: Path) -> Iterator[_KeyEntry]:
    """Yield what the file says. raises ConfigError if it is not YAML, or no mapping"""
    import yaml  # only used with --config

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that is there twice in a value."""

    def mapping(loader: Loader, node: Any) -> dict[Any, Any]:
        pairs = [(loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value]
        return reject_duplicate_keys([(str(key), value) for key, value in pairs])

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        data = read_bounded(file, _MAX_BYTES)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{file} has more than {_MAX_BYTES} bytes", _EXPECTED, "name another file")
        loader = Loader(data.decode())
        node = loader.get_single_node()
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            kind = type(loader.construct_object(node, deep=True)).__name__
            raise ConfigError(f"{file} holds a {kind}", _EXPECTED, "correct the file")
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = loader.construct_object(key_node, deep=True)
            try:
                yield _KeyEntry(line, key, loader.construct_object(value_node, deep=True))
            except ValueError as error:  # a date that there is not, a key twice
                yield _KeyEntry(line, key, None, str(error))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", _EXPECTED, "check the path") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        reason = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{place}: not valid YAML: {reason}", _EXPECTED, "correct the line") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, control characters
        reason = " ".join(str(error).split("\n")[0].split())
        raise ConfigError(f"{file} is not valid YAML: {reason}", _EXPECTED, "correct the file") from None


def _check_value(entry: _KeyEntry, param: click.Parameter, opt: str) -> tuple[list[_Mistake], object]:
    """Return what is wrong with a value, and the value as click takes it from a default."""
    value, shown = entry.value, f"{entry.name} is {reprlib.repr(entry.value)}"
    if isinstance(param, click.Option) and param.is_flag:
        if isinstance(value, bool):
            return [], value if opt in param.opts else not value
        return [_Mistake(entry.line, shown, "true or false", "write one of them")], None
    items = value if isinstance(value, list) and param.multiple else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        expected = "a text or a number" + (", or a list of them" if param.multiple else "")
        return [_Mistake(entry.line, shown, expected, "correct the value")], None
    texts = tuple(str(item) for item in items)
    try:
        converted = [param.type.convert(text, param, None) for text in texts]
        if isinstance(param, GroupedOption) and param.field is not None and not param.multiple:
            check_value(param.field, converted[0])
    except click.BadParameter as error:
        expected = _NUMBERS.get(param.type.name, error.message.rstrip("."))
        return [_Mistake(entry.line, shown, expected, "correct the value")], None
    except ConfigError as error:
        return [_Mistake(entry.line, error.what, error.expected, error.fix)], None
    return [], texts if param.multiple else texts[0]
