"""Grammars that no finite text matches: refused before an answer starts that could only end at `max_tokens`.

The set of things that can end is the least fixed point of the clauses "this can end if all of those can" (Horn
clauses), found in linear time. Only what certainly has no end is refused; what is not understood counts as ending.
"""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output.json_schema import resolved

Clause = tuple[Hashable, Sequence[Hashable]]  # the first can end, if all of the others can

_OF_ONE = ("additionalProperties", "items", "additionalItems", "not")
_OF_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_NEVER = object()  # no clause derives it

# In llguidance's Lark. A rule with attributes may be cut by them (max_tokens, stop), so it can end.
_LARK = re.compile(
    r"""(?P<skip>[ \t\r\n]++|//[^\n]*+|^%(?:ignore|import|llguidance)\b[^\n]*+)
    |(?P<head>[?!]?(?P<rule>[A-Za-z_][\w-]*+)(?P<attributes>\[[^\]\n"/]{0,200}+\])?(?:\.\d++)?[ \t]*+:(?!:))
    |(?P<json>%json\b\s*+)
    |(?P<text>"(?:[^"\\\n]|\\.)*+"i?|/(?:[^/\\\n]|\\.)++/[a-z]*+|<[^<>\n]*+>)
    |(?P<name>[A-Za-z_][\w-]*+)
    |(?P<mark>[()\[\]|?*+]|\{\d++(?:,\d*+)?\})""",
    re.MULTILINE | re.VERBOSE,
)


def check_terminates(params: StructuredOutputsParams, text: str, lark: str) -> None:
    """Check a grammar that llguidance has compiled. lark: its source. raises RequestError"""
    if params.kind == "json":
        ends = _schema_ends(params, json.loads(text))
    else:
        ends = params.kind != "grammar" or _lark_ends(params, lark)
    if not ends:
        raise params.refused(
            f"its {params.kind} cannot be met by any text that ends", "a way out of what contains itself",
            "make a part of it optional, or give it an alternative",
        )  # fmt: skip


def closed(clauses: Iterable[Clause]) -> set[Hashable]:
    """Return everything that follows from the clauses."""
    heads: list[Hashable] = []
    n_missing: list[int] = []
    waiting: dict[Hashable, list[int]] = {}
    ready: list[Hashable] = []
    for i, (head, needs) in enumerate(clauses):
        heads.append(head)
        n_missing.append(len(needs))
        for need in needs:
            waiting.setdefault(need, []).append(i)
        if not needs:
            ready.append(head)
    result: set[Hashable] = set()
    while ready:
        one = ready.pop()
        if one in result:
            continue
        result.add(one)
        for i in waiting.get(one, ()):
            n_missing[i] -= 1
            if not n_missing[i]:
                ready.append(heads[i])
    return result


def _schema_ends(params: StructuredOutputsParams, root: Mapping[str, Any]) -> bool:
    """Return whether a finite value matches the schema (identified by id()). raises RequestError for `minProperties`"""
    clauses: list[Clause] = [(id(True), ())]
    todo: list[object] = [root]
    visited: set[int] = {id(True)}
    is_certain = True
    while todo:
        schema = todo.pop()
        if id(schema) in visited or schema is False:
            continue
        visited.add(id(schema))
        if not isinstance(schema, dict):
            clauses.append((id(schema), ()))
            continue
        is_certain &= schema is root or "$id" not in schema  # below it, references are not relative to the root
        _check_least(params, schema)
        todo += _inside(schema)
        # `true`, which everything matches, stands for an unknown target
        target = resolved(root, schema["$ref"], missing=True) if "$ref" in schema else True
        todo.append(target)
        clauses += _clauses(schema, target)
    return not is_certain or id(root) in closed(clauses)


def _check_least(params: StructuredOutputsParams, schema: Mapping[str, Any]) -> None:
    """Check `minProperties`: optional keys may come twice, and required ones again with an escape in them."""
    least, n_required = schema.get("minProperties"), len(_required(schema))
    if type(least) is int and least > max(1, n_required) and "object" in _types(schema):
        raise params.refused(
            f'its {params.kind} has "minProperties": {least} with {n_required} required, and keys may repeat',
            "no more than `required` names", 'name them in "required", or leave "minProperties" out',
        )  # fmt: skip


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names; if none, one that stands for all that are possible."""
    type_names = schema.get("type")
    if isinstance(type_names, str):
        return [type_names]
    return [one for one in _several(schema, "type") if isinstance(one, str)] or ["object", "null"]


def _required(schema: Mapping[str, Any]) -> set[str]:
    return {name for name in _several(schema, "required") if isinstance(name, str)}


def _inside(schema: Mapping[str, Any]) -> Iterator[object]:
    for key in _OF_ONE:
        if isinstance(schema.get(key), dict | bool):
            yield schema[key]
    for key in _OF_MANY:
        yield from _several(schema, key)
    for key in _OF_NAMES:
        yield from _subschemas(schema, key).values()


# llguidance ignores other spellings.
def _several(schema: Mapping[str, Any], key: str) -> list[object]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _subschemas(schema: Mapping[str, Any], key: str) -> dict[str, object]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _clauses(schema: Mapping[str, Any], target: object) -> Iterator[Clause]:
    me = id(schema)
    needs: list[Hashable] = [id(target), *map(id, _several(schema, "allOf")), (me, "type")]
    for key in ("anyOf", "oneOf"):
        branches = _several(schema, key)
        needs += [(me, key)] if branches else []
        yield from (((me, key), [id(branch)]) for branch in branches)
    for kind in _types(schema):
        yield (me, "type"), list(map(id, _must_have(schema, kind)))
    yield me, needs


def _must_have(schema: Mapping[str, Any], kind: str) -> Iterator[object]:
    """Yield the schemas that every value of this type contains."""
    if kind == "object":
        properties = _subschemas(schema, "properties")
        additional = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
        additional = additional if isinstance(additional, dict | bool) else True
        yield from (properties.get(name, additional) for name in _required(schema))
    elif kind == "array":
        items, least = schema.get("items"), schema.get("minItems")
        first = _several(schema, "prefixItems") or _several(schema, "items")
        least = least if isinstance(least, int) else 0
        yield from first[: max(0, least)]
        if least > len(first) and isinstance(items, dict | bool):
            yield items


def _lark_ends(params: StructuredOutputsParams, lark: str) -> bool:
    """Return whether a finite text matches the grammar. raises RequestError for `minProperties` in one of its schemas

    Groups are rules without a name. Terminals end: llguidance refuses terminals that contain themselves.
    """
    clauses: list[Clause] = []
    finite: set[Hashable] = set()
    used: set[Hashable] = set()
    open_groups: list[tuple[Hashable, list[Hashable]]] = []  # each with the requirements of its current alternative
    place = 0
    while place < len(lark):
        token = _LARK.match(lark, place)
        if token is None:
            return True  # not understood
        place = token.end()
        if token["head"]:
            clauses += open_groups[-1:]
            open_groups = [(token["rule"], [])]
            finite.add(token["rule"])
            if token["attributes"] or token["rule"].lstrip("_")[:1].isupper():
                clauses.append((token["rule"], ()))
        elif token["skip"]:
            continue
        elif not open_groups:
            return True
        elif token["json"]:
            try:
                schema, place = json.JSONDecoder().raw_decode(lark, place)
            except (ValueError, RecursionError):
                return True
            open_groups[-1][1].append(() if not isinstance(schema, dict) or _schema_ends(params, schema) else _NEVER)
        elif token["mark"]:
            if not _marked(token["mark"], open_groups, clauses):
                return True
        else:
            used |= {token["name"]} if token["name"] else set()
            open_groups[-1][1].append(token["name"] or ())
    clauses += open_groups[-1:]
    return "start" in closed([((), ()), *((name, ()) for name in used - finite), *clauses])


def _marked(mark: str, open_groups: list[tuple[Hashable, list[Hashable]]], clauses: list[Clause]) -> bool:
    """Process a bracket or bar. Return False if it is not understood."""
    group, needs = open_groups[-1]
    if mark in "([":
        open_groups.append(((len(clauses), len(open_groups)), []))
        clauses += [(open_groups[-1][0], ())] if mark == "[" else []
    elif mark == "|":
        clauses.append((group, needs))
        open_groups[-1] = (group, [])
    elif mark in ")]":
        if len(open_groups) == 1:
            return False
        clauses.append(open_groups.pop())
        open_groups[-1][1].append(group)
    elif not needs:
        return False
    elif mark in "?*" or re.match(r"\{0+[,}]", mark):
        needs[-1] = ()
    return True
