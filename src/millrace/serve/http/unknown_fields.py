"""Handling of fields that a request's struct does not have, the same for all protocols.

A field that changes no answer here is accepted and reported in the header `x-millrace-ignored`. A field that would
change the answer is refused: another endpoint's name of one of our fields, an unsupported field, or a name within two
letters of a field that does something, which the error suggests.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import get_args, get_type_hints

import msgspec
from msgspec import UNSET, inspect

from millrace.errors import RequestError
from millrace.serve.http.errors import not_yet
from millrace.serve.llm.reasoning import reasoning_switch
from millrace.serve.llm.unsupported_fields import CHANGING, ELSEWHERE, INSTEAD, OTHER_NAMES, format_value, is_neutral

MAX_NAME = 64  # characters of a reported name
MAX_NAMES = 64  # in the header
MAX_UNKNOWN = 128  # fields of one object: comparing names takes time
MAX_DIFFERENT = 1024  # different ones of one request
_MAX_EDITS = 2
_SHORT, _SHORTEST = 5, 4  # letters of known names that may differ in one letter; shorter ones in none
_PROMPTS, _SYSTEM = frozenset(["messages", "prompt", "input"]), frozenset(["system", "instructions"])
_MEDIA = frozenset(["image", "images", "image_url", "audio", "input_audio", "video", "video_url", "file", "files"])


def ignored_names(
    fields: Mapping[str, object],
    known_names: Collection[str],
    prefix: str,
    param: str = "",
    harmless: set[str] | None = None,
    useful: Collection[str] | None = None,
) -> list[str]:
    """Remove the unknown names from `fields`, and return them as they are reported to the client.

    prefix: the path of `fields`, "" for the request itself; param: the field that an error is about
    harmless: names unlike all of `useful`, which is extended; useful: the known names that do something, by default all
    raises RequestError for a name that was probably meant to be a known one, or for too many of them
    """
    harmless = set() if harmless is None else harmless
    unknown = [name for name in fields if name not in known_names]
    if len(unknown) > MAX_UNKNOWN:
        what = f"{prefix or 'the request'} has {len(unknown)} unknown fields"
        raise RequestError(what, f"at most {MAX_UNKNOWN}", "leave them out", (param or prefix)[:100] or None)
    ignored = [name for name in unknown if fields[name] is not None]
    for name in unknown:
        if name in harmless:
            del fields[name]  # type: ignore[attr-defined]
            continue
        if (meant := closest_name(name, known_names if useful is None else useful)) is not None:
            path = f"{prefix}.{name}" if prefix else name
            raise unknown_field(path, f'did you mean "{meant}"?', param=param)
        harmless.add(name)
        del fields[name]  # type: ignore[attr-defined]
    if len(harmless) > MAX_DIFFERENT:
        what, expected = (
            f"the request has more than {MAX_DIFFERENT} different unknown fields",
            f"at most {MAX_DIFFERENT}",
        )
        raise RequestError(what, expected, "leave them out", (param or prefix)[:100] or None)
    field = re.sub(r"\[\d+\]", "", prefix)
    return [header_name(f"{field}.{name}" if field else name) for name in ignored]


def unknown_field(
    path: str, expected: str, fix: str = "correct the name, or leave it out", param: str = ""
) -> RequestError:
    return RequestError(f'unknown field "{path[:500]}"', expected, fix, (param or path)[:100])


def header_name(name: str) -> str:
    """Return a client's name in a form that is valid in a header."""
    cut = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
    return "".join(
        letter if letter.isascii() and letter.isprintable() and letter not in ', "' else "?" for letter in cut
    )


def closest_name(name: str, known_names: Collection[str]) -> str | None:
    """Return the known name that differs from `name` by at most two letters (short names: one or none), or None.

    Names that differ in half of their letters or more are never close.
    """
    if len(name) > MAX_NAME:
        return None
    candidates = [
        (letters, other)
        for other in known_names
        if abs(len(other) - len(name)) <= _MAX_EDITS
        and len(set(name.casefold()) ^ set(other.casefold())) <= 2 * _MAX_EDITS  # much faster than what follows
        and (letters := _edit_distance(name.casefold(), other.casefold())) <= _MAX_EDITS
        and 2 * letters < min(len(name), len(other))
        and (letters <= 1 or len(other) > _SHORT)
        and (letters == 0 or len(other) >= _SHORTEST)
    ]
    return min(candidates)[1] if candidates else None


def _edit_distance(a: str, b: str) -> int:
    """Return how many letters to add, remove, replace or swap with the next one to get from a to b."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                least = min(least, last[j - 2] + 1)
            row.append(least)
    return row[-1]


class UnknownFields:
    """Filter that removes the unknown fields from a decoded request."""

    def __init__(
        self, kind: type[msgspec.Struct], served: Collection[str], useful: Collection[str], names: Mapping[str, str],
        answers: bool,
    ) -> None:  # fmt: skip
        """Describe a request.

        kind: the struct that it becomes, with every field that is accepted or refused by value
        served: the struct's own fields; useful: those that do something
        names: our field names mapped to this protocol's; answers: other fields could change the answer
        """
        self._kind, self._served, self._useful = kind, served, useful
        self._names, self._answers = names, answers

    def remove_from(self, request: dict[str, object]) -> list[str]:
        """Remove what the struct and its inner structs do not have, and return it. raises RequestError"""
        field_names = self._kind.__struct_fields__
        for name in [name for name in request if name not in field_names]:
            self._check(name, request)
        ignored = ignored_names(request, field_names, "", useful=self._useful)
        harmless: dict[type[msgspec.Struct], set[str]] = {}
        for name, value in request.items():
            for where, part, struct in _structs(_field_types(self._kind).get(name), value, name):
                if media := [
                    one for one in part if one in _MEDIA and part[one] and one not in struct.__struct_fields__
                ]:
                    raise not_yet(f"{where}.{media[0]}", "send text only")
                of_struct = harmless.setdefault(struct, set())
                ignored += ignored_names(part, struct.__struct_fields__, where, harmless=of_struct)
        return ignored

    def _check(self, name: str, request: dict[str, object]) -> None:
        """Check an unknown name. raises RequestError if it would change the answer"""
        if name in ELSEWHERE and name not in self._names:
            where = ELSEWHERE[name]
            raise unknown_field(name, f'"{name}" in a request to {where}', f"send it to {where}")
        for ours in meanings(name):
            theirs = self._names.get(ours, ours)
            if theirs.partition(".")[0] not in self._served or theirs == name:
                continue
            if request[name] == request.get(theirs):  # some clients send all names of a field
                return
            if (ours not in _PROMPTS or name in _SYSTEM) and is_neutral(request[name], CHANGING.get(ours, ())):
                if "." not in theirs and request[name] and request.get(theirs) is None:
                    request[theirs] = request.pop(name)  # what is neutral may differ from the model's own default
                return
            raise unknown_field(name, f'did you mean "{theirs}"?')
        if name == "best_of" and request[name] == request.get("n"):
            return
        if reasoning_switch(name, request[name]) is False and "chat_template_kwargs" in self._names:
            raise unknown_field(name, f'did you mean "{self._names["chat_template_kwargs"]}"?')
        if name == "extra_body" and request[name]:
            fix = "put its fields beside the others: clients in Python do so by themselves"
            raise unknown_field(name, "the fields that it holds", fix)
        if self._answers:
            check_changing(name, request[name], name)


def meanings(name: str) -> tuple[str, ...]:
    """Return our names of another server's field; maxOutputTokens is max_output_tokens."""
    snake = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name[:MAX_NAME]).lower()
    return OTHER_NAMES.get(name) or OTHER_NAMES.get(snake) or (name if name == snake else snake,)


def check_changing(name: str, value: object, path: str) -> None:
    """Check a field. raises RequestError if its value would change the answer where the field is supported"""
    neutral = CHANGING.get(name)
    if neutral is None or is_neutral(value, neutral):
        return
    also = f", or with {' or '.join(map(format_value, neutral))}" if neutral else ""
    raise RequestError(
        f"{path} is not supported here", f"a request without it{also}", f"leave it out{INSTEAD.get(name, '')}", path
    )


def check_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    """Check an unsupported field. raises RequestError if its value is not one of `neutral`, which change nothing"""
    if value is not UNSET and not is_neutral(value, neutral):
        raise not_yet(name, _fix_hint(name, neutral))


def _fix_hint(name: str, neutral: tuple[object, ...]) -> str:
    values = " or ".join(map(format_value, neutral))
    return "leave it out" + (f", or send {values}" if values else "") + INSTEAD.get(name, "")


def _structs(
    kind: inspect.Type | None, value: object, path: str
) -> Iterator[tuple[str, dict[str, object], type[msgspec.Struct]]]:
    """Yield the path, the object and the struct of every object in `value` that becomes a struct."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _structs(one, value, path)
        case inspect.ListType() if isinstance(value, list):
            for i, item in enumerate(value):
                yield from _structs(kind.item_type, item, f"{path}[{i}]")
        case inspect.StructType() if isinstance(value, dict):
            yield path, value, kind.cls
            for name, part in list(value.items()):
                yield from _structs(_field_types(kind.cls).get(name), part, f"{path}.{name}")


@cache
def _field_types(kind: type[msgspec.Struct]) -> Mapping[str, inspect.Type]:
    struct_type = inspect.type_info(kind)
    assert isinstance(struct_type, inspect.StructType)
    return {field.encode_name: _plain(field.type) for field in struct_type.fields}


def _plain(kind: inspect.Type) -> inspect.Type:
    """Return a type without its metadata."""
    return _plain(kind.type) if isinstance(kind, inspect.Metadata) else kind


def roles_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the roles that messages of a request may have."""
    messages = _field_types(kind).get("messages")
    for each in messages.types if isinstance(messages, inspect.UnionType) else (messages,):
        if isinstance(each, inspect.ListType) and isinstance(each.item_type, inspect.StructType):
            return get_args(get_type_hints(each.item_type.cls)["role"])
    return ()
