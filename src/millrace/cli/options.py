"""Turns a settings class into click options: flag, help, default and range come from its fields.

@settings_options(BuildSettings, RunSettings)
def command(**options): build = make_settings(BuildSettings, options)
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

import click

from millrace.settings import Setting, Settings, declared, flag_of, plain_type

S = TypeVar("S", bound=Settings)
F = TypeVar("F", bound=Callable[..., Any])
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


class GroupedOption(click.Option):
    """An option with the heading under which `--help` lists it, and the field of a settings class that it sets.

    None: under Options; of no class
    """

    group: str | None = None
    field: "Field[Any] | None" = None


class GroupedCommand(click.Command):
    """A command whose `--help` lists options under the titles of their settings classes."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group, in the order in which they are declared; options without one come last."""
        groups: dict[str | None, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", None), []).append(record)
        rest = groups.pop(None, [])
        for title, records in (*groups.items(), ("Options" if not groups else "Other", rest)):
            if records:
                with formatter.section(str(title)):
                    formatter.write_dl(records)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for programs.")


def settings_options(*classes: type[Settings]) -> Callable[[F], F]:
    """Add all fields of settings classes as options of a command, in order. Field names must be unique."""

    def decorate(function: F) -> F:
        for cls in reversed(classes):
            for f in reversed(fields(cls)):
                function = _option(cls, f, cls.title)(function)
        return function

    return decorate


def make_settings(cls: type[S], values: Mapping[str, Any]) -> S:
    """Create a settings object from click's values. raises ConfigError for a value out of range"""
    return cls(**{f.name: values[f.name] for f in fields(cls)})


def _option(cls: type[Settings], f: "Field[Any]", group: str | None) -> Callable[[F], F]:
    declaration, kind = declared(f), plain_type(cls, f.name)
    assert f.default is not MISSING, f"{cls.__name__}.{f.name} has no default"
    option = type("GroupedOption", (GroupedOption,), {"group": group, "field": f})
    text = (
        declaration.help[0].upper() + declaration.help[1:]
        if declaration.help.split()[0].isalpha()
        else declaration.help
    )
    if kind is bool:
        flags = flag_of(f.name) + (f"/{flag_of(f'no_{f.name}')}" if f.default else "")  # what is on can be turned off
        return click.option(flags, f.name, cls=option, is_flag=True, default=f.default, help=text)
    metavar = declaration.metavar or (
        "SIZE" if declaration.size else "|".join(declaration.choices) if declaration.choices else _METAVARS[kind]
    )
    return click.option(
        flag_of(f.name),
        f.name,
        cls=option,
        type=str if declaration.size or kind is tuple else kind,
        default=f.default,
        multiple=kind is tuple,
        metavar=metavar,
        show_default=not declaration.size and f.default is not None and f.default != (),
        help=text + _help_suffix(f.default, declaration, kind),
    )


def _help_suffix(default: object, declaration: Setting, kind: type) -> str:
    """Return the end of an option's help that click cannot generate."""
    size = f"; default: {default >> 20}M" if declaration.size and isinstance(default, int) else ""
    return size + ("; may be given more than once" if kind is tuple else "")
