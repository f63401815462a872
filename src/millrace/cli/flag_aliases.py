"""Flags of other programs: the hint that is printed if a command line or a flag file contains one."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

import click

from millrace.cli.flag_hints import BUILD, ENGINE, LOAD, LOCAL, SAME, SERVER, TENSORS, FlagKind, Groups
from millrace.errors import close_matches

REPOSITORY = "--model-repository"
# A flag that only these commands have -> what their users type by habit; the first that knows a flag is taken.
_FAMILIES: tuple[tuple[str, Mapping[FlagKind, Groups]], ...] = (
    (REPOSITORY, SERVER), ("--temperature", LOCAL), ("--isl-stddev", LOAD), ("--tensor-format", TENSORS),
    ("--precision-map", BUILD), ("", {FlagKind.SAME: SAME}), ("--max-context", ENGINE),
)  # fmt: skip
_SHOWN, _SIMILAR = 5, 0.6  # names that are listed; how alike they are, of 1
_SWITCHES = ("--allow-client-shm", "--model-namespacing")
_FIX = {FlagKind.SAME: "", FlagKind.FIELD: "leave it out, and send the field with each request"}


def hint(option: str, value: str | None, known_options: Collection[str]) -> tuple[str, str]:
    """Return what is expected in place of an option that a command does not have, and how to fix it ("": correct it).

    value: what was given with it, where it is known; known_options: the options that the command has
    """
    option, value = _normal(option), (value or "").lower()
    if option in known_options:  # TensorRT-LLM writes underscores
        return FlagKind.SAME.format(option), ""
    for name in (f"{option}={value}", option, _first(option)):
        for kind, meaning in _meanings(name, known_options):
            meaning, _, note = meaning.partition(", ") if kind is FlagKind.SAME else (meaning, "", "")
            return kind.format(meaning) + (f" ({note})" if note else ""), _FIX.get(kind, "leave it out")
    positive = option.replace("--no-", "--", 1)
    if positive != option:
        for kind, meaning in _meanings(positive, known_options):
            if kind is FlagKind.MISSING:
                return FlagKind.LEAVE.format("what it turns off is not supported anyway"), "leave it out"
            if kind is FlagKind.NEEDLESS:
                return FlagKind.MISSING.format(f"it cannot be turned off ({meaning})"), "leave it out"
    return nearest_options(option, known_options), ""


def _meanings(name: str, known_options: Collection[str]) -> Iterator[tuple[FlagKind, str]]:
    """Yield the meanings of a flag for a command with the known options."""
    for family, (mark, _) in enumerate(_FAMILIES):
        if mark and mark not in known_options:
            continue
        for kind, meaning in _flags(family).get(name, ()):
            if (
                kind is not FlagKind.SAME
                or meaning in ("MODEL", "URL")
                or re.split("[ ,]", meaning)[0] in known_options
            ):
                yield kind, meaning


@cache
def _flags(family: int) -> dict[str, list[tuple[FlagKind, str]]]:
    """Return the table of a family, by flag."""
    table: dict[str, list[tuple[FlagKind, str]]] = {}
    for kind, groups in _FAMILIES[family][1].items():
        for meaning, flags in groups.items():
            for flag in flags.split():
                table.setdefault(flag, []).append((kind, meaning))
    return table


def nearest_options(option: str, options: Collection[str]) -> str:
    """Return `did you mean "--port"?`, or the options that share a word with it or look like it."""
    meant = close_matches(option, options)
    if meant is not None:
        return f'did you mean "{meant}"?'
    words = set(option[:200].strip("-").split("-"))

    def likeness(name: str) -> float:
        shared = len(words & set(name.strip("-").split("-")))
        return shared + difflib.SequenceMatcher(None, option[:200].strip("-"), name.strip("-")).ratio()

    near = sorted((name for name in options if likeness(name) >= _SIMILAR), key=likeness, reverse=True)[:_SHOWN]
    if near:
        return f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
    return f"one of: {', '.join(options)}" if 0 < len(options) <= _SHOWN else "an option of this command"


def _normal(option: str) -> str:
    return option.lower().replace("_", "-") if option.startswith("--") else option


def _is_bundle(argument: str) -> bool:
    """Whether click would parse it as several short options, or as one with its value (-b8)."""
    return re.match(r"-[a-zA-Z][^=]", argument) is not None


def _first(option: str) -> str:
    """Return -b of -b8; a name of several letters (-fa) as it is."""
    return option[:2] if re.match(r"-[a-zA-Z][^a-zA-Z]", option) else option


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return the value of an option on a command line: `--x 1`, `--x=1`."""
    for argument, after in zip(arguments, [*arguments[1:], "-"], strict=True):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else None if after.startswith("-") else after
    return None


def check_short(command: click.Command, ctx: click.Context, arguments: Sequence[str]) -> None:
    """Refuse `-tp 1`, which click would read as `-t p`. raises click.NoSuchOption with the whole name"""
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    names, value_next = [*options], False
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        if not value_next and name not in options and _is_bundle(name):
            begins = options.get(name[:2])
            if begins is None or next(_meanings(name, names), None) is not None:
                raise click.NoSuchOption(name, ctx=ctx)
        param = None if value_next else options.get(argument)
        value_next = isinstance(param, click.Option) and not (param.is_flag or param.count)


def translate_flag(arguments: list[str]) -> list[str]:
    """Rewrite a command line: Triton's switches take a value, as in `--allow-client-shm=true`."""
    if arguments[:1] != ["serve"]:
        return arguments
    return [arg.removesuffix("=true") if arg.removesuffix("=true") in _SWITCHES else arg for arg in arguments]
