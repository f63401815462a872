"""`--config FILE`: flags of a command in YAML, as `vllm serve --config` takes them.

    model: ./llama-3.2-1b
    port: 9000
    served-model-name: [chat, chat-large]
    prefix-cache: false

Flags on the command line go before those of the file, which go before the defaults.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from millrace.cli.other_names import meant_by
from millrace.errors import ConfigError, nearest
from millrace.settings import once, read_given

_MOST_BYTES = 1 << 20
_EXPECTED = "YAML with one flag a line, like `port: 9000`"


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
    """Return the values of a command's parameters by their Python names. raises ConfigError"""
    known = {_key(opt): (p, opt) for p in command.params for opt in (*p.opts, *p.secondary_opts) if len(opt) > 2}
    values: dict[str, Any] = {}
    for key, value in _read(file).items():
        param, opt = known.get(_key(str(key)), (None, ""))
        if param is None or param.is_eager:
            flags = [f"--{name}" for name, (p, _) in known.items() if isinstance(p, click.Option) and not p.is_eager]
            expected = meant_by(f"--{_key(str(key))}", flags) or nearest(f"--{_key(str(key))}", flags)
            raise ConfigError(f"{file}: there is no flag for the key {key!r:.60}", expected, "correct the key")
        if param.name in values:
            raise ConfigError(f"{file}: {key!r:.60} sets {opt} again", "one line for each flag", "remove one of them")
        if value is not None:
            assert param.name is not None
            values[param.name] = _value(file, str(key), value, param, opt)
    return values


def _key(name: str) -> str:
    return name.removeprefix("--").replace("_", "-").lower()


def _read(file: Path) -> Mapping[object, object]:
    import yaml  # only used with --config

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that is there twice."""

    def mapping(loader: Loader, node: Any) -> dict[Any, Any]:
        pairs = [(loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value]
        return once([(str(key), value) for key, value in pairs])

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        data = read_given(file, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{file} has more than {_MOST_BYTES} bytes", _EXPECTED, "name another file")
        found = yaml.load(data.decode(), Loader=Loader)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", _EXPECTED, "check the path") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, a key twice, a date that there is not
        raise ConfigError(f"{file} is not valid YAML: {error}", _EXPECTED, "correct the file") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}", _EXPECTED, "correct the file")
    return found


def _value(file: Path, key: str, value: object, param: click.Parameter, opt: str) -> object:
    """Return a value as click takes it from a default. raises ConfigError"""
    is_flag = isinstance(param, click.Option) and param.is_flag
    if is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{file}: {key} is {value!r:.60}", "true or false", "write one of them")
        return value if opt in param.opts else not value
    items = value if isinstance(value, list) and param.multiple else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            expected = "a text or a number" + (", or a list of them" if param.multiple else "")
            raise ConfigError(f"{file}: {key} is {item!r:.60}", expected, "correct the value")
    texts = tuple(str(item) for item in items)
    return texts if param.multiple else texts[0]
