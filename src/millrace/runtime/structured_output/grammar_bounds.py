"""Limits on grammars before llguidance compiles them: sizes, and the length of reference chains.

llguidance follows references by recursion: some thousand of them would overflow its stack. All limits are far below.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from millrace.runtime.structured_output.json_schema import subschemas
from millrace.runtime.structured_output.json_schema_numbers import Refuse, Schema

MAX_CHAIN = 1000  # schemas, rules or terminals that refer to one another
MAX_PROPERTIES = 500  # of one object
MAX_ALL_PROPERTIES = 2000  # of all objects of a schema, or of a grammar's schemas together
MAX_RULES = 1000  # rules and terminals of a grammar
MAX_GBNF_RULES = 500  # reading GBNF takes time in proportion to the square of their number

_SMALLER = "leave out properties, or split the request"

T = TypeVar("T")
# Possessive: an unterminated text is not matched again from a shorter one.
_TOKEN = re.compile(
    r"""//[^\n]*+ | "(?:[^"\\\n]|\\.)*+" | /(?:[^/\\\n]|\\.)++/
    |(?P<json>%json\b\s*+)
    |^[ \t]*+[?!]?(?P<rule>[A-Za-z_][\w-]*+)(?:\[[^\]\n]*+\])?(?:\.\d++)?[ \t]*+:(?!:)
    |(?P<name>[A-Za-z_][\w-]*+)""",
    re.MULTILINE | re.VERBOSE,
)


def check_schema(root: Schema, refuse: Refuse) -> int:
    """Return the number of properties of all objects together. raises RequestError beyond a bound"""
    n_properties = 0

    def within(schema: Schema) -> Iterator[Schema]:
        return (part for part, _ in subschemas(root, schema) if isinstance(part, dict))

    for schema in _visited([root], within, id, refuse):
        n = sum(len(schema[key]) for key in ("properties", "patternProperties") if isinstance(schema.get(key), dict))
        if n > MAX_PROPERTIES:
            raise refuse(f"an object of its schema has {n} properties", f"at most {MAX_PROPERTIES}", _SMALLER)
        n_properties += n
        check_properties(n_properties, refuse)
    return n_properties


def check_properties(n: int, refuse: Refuse) -> None:
    """Check the properties of all objects together. raises RequestError"""
    if n > MAX_ALL_PROPERTIES:
        expected = f"at most {MAX_ALL_PROPERTIES}"
        raise refuse(f"its objects have more than {MAX_ALL_PROPERTIES} properties together", expected, _SMALLER)


def check_lark(lark: str, refuse: Refuse) -> None:
    """Check the rules and terminals of a Lark grammar. raises RequestError beyond a bound"""
    references: dict[str, dict[str, None]] = {"start": {}}
    current = "start"
    for token in _tokens(lark):
        if token["rule"]:
            current = token["rule"]
            references.setdefault(current, {})
            check_rules(len(references) - 1, refuse)
        elif token["name"]:
            references[current][token["name"]] = None

    def uses(rule: str) -> Iterator[str]:
        return (name for name in references[rule] if name in references)

    for _ in _visited(references, uses, str, refuse):
        pass


def check_rules(n: int, refuse: Refuse, limit: int = MAX_RULES) -> None:
    """Check a grammar's number of rules. raises RequestError"""
    if n > limit:
        raise refuse(f"it has more than {limit} rules and terminals", f"at most {limit}", "simplify the grammar")


def with_schemas(lark: str, rewrite: Callable[[Schema], Schema]) -> str:
    """Return a Lark grammar with each schema behind `%json` rewritten."""
    parts: list[str] = []
    end = 0
    for token in _tokens(lark):
        if not token["json"]:
            continue
        try:
            schema, behind = json.JSONDecoder().raw_decode(lark, token.end())
        except (ValueError, RecursionError):
            continue  # llguidance reports the error
        if isinstance(schema, dict):
            parts += [lark[end : token.end()], json.dumps(rewrite(schema))]
            end = behind
    return "".join([*parts, lark[end:]])


def _tokens(lark: str) -> Iterator[re.Match[str]]:
    """Yield the relevant tokens, with the JSON after `%json` skipped."""
    at = 0
    while (token := _TOKEN.search(lark, at)) is not None:
        yield token
        at = token.end()
        if token["json"]:
            try:
                at = json.JSONDecoder().raw_decode(lark, at)[1]
            except (ValueError, RecursionError):
                continue


def _visited(
    roots: Iterable[T], within: Callable[[T], Iterator[T]], key: Callable[[T], Any], refuse: Refuse
) -> Iterator[T]:
    """Yield each part once, in depth-first order. raises RequestError if one is too far from its root"""
    visited: set[Any] = set()
    for root in roots:
        path = [iter((root,))]
        while path:
            part = next(path[-1], None)
            if part is None:
                path.pop()
                continue
            if key(part) in visited:
                continue
            visited.add(key(part))
            yield part
            path.append(within(part))
            if len(path) > MAX_CHAIN + 2:
                what = f"it has a chain of more than {MAX_CHAIN} references"
                raise refuse(what, f"a chain of at most {MAX_CHAIN}", "repeat parts less deeply, or write them out")
