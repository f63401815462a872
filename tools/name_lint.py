"""Refuses names that do not say what they stand for, two classes of one name, and vague phrases in docstrings.

python -m tools.name_lint

A participle or pronoun (`told`, `asked`, `beside`) names nothing: a file, class, function, parameter, field or variable
is called by the noun of its domain. Names that were there before a word was added are counted in `ALLOWED`, which only
shrinks.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("src/millrace")
WORDS = frozenset(
    [
        "told", "asked", "said", "known", "given", "kept", "found", "seen", "held", "made", "taken", "wanted",
        "written", "whole", "beside", "others", "brought", "drawn", "otherwise", "somebody", "nobody", "whoever", "of",
        "why", "how", "most", "what", "where", "which", "there", "named", "turns", "each", "every", "some", "says",
        "keeps", "mend",
    ]
)  # fmt: skip
IN_COMPOUNDS = frozenset(  # `kept_pages`, `StepTold`
    ["told", "asked", "said", "wanted", "beside", "brought", "otherwise", "somebody", "nobody", "whoever", "kept"]
)  # fmt: skip
PHRASES = ("so many",)  # not in docstrings, which name the parameter instead
NOT_AS_DEFINITIONS = frozenset(["one"])  # a variable of a short loop may be called so
# Names with these words that are left. Lower a number with the last of its names that goes; it never grows.
ALLOWED = {
    "what": 237,
    "most": 70,
    "where": 53,
    "each": 45,
    "kept": 27,
    "some": 26,
    "how": 25,
    "named": 15,
    "turns": 13,
    "every": 8,
    "which": 9,
    "why": 6,
    "of": 5,
    "says": 2,
    "keeps": 1,
}
# Files with names of external interfaces: Triton's protobuf messages, its Python API, schemas of openapi.json.
EXTERNAL = (
    "serve/llm/response_types.py",
    "model_repository/config/model_config.py",
    "model_repository/python_backend/stub/",
)
WIRE_BASES = frozenset(["Struct", "TypedDict"])  # whose fields are named by a protocol or a file
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
Name = tuple[int, str, str]  # line, kind, name


def words_of(name: str) -> list[str]:
    """Split a name in snake_case or CamelCase; digits separate words."""
    return [word.lower() for word in _WORD.findall(name)]


def names(tree: ast.Module) -> Iterator[Name]:
    """Yield every name that a module defines."""
    fields = {
        id(field.target): is_on_wire(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                if not fields.get(id(node), False):
                    yield node.lineno, "field" if id(node) in fields else "variable", name
            case ast.ClassDef(name=name):
                yield node.lineno, "class", name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, "function", name
            case ast.arg(arg=name):
                yield node.lineno, "parameter", name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, "variable", name
            case ast.MatchMapping(rest=str(name)):
                yield node.lineno, "variable", name
            case ast.Import() | ast.ImportFrom():
                yield from ((node.lineno, "import", alias.asname) for alias in node.names if alias.asname)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, "attribute", name
            case ast.Call():
                yield from called_names(node)


def called_names(call: ast.Call) -> Iterator[Name]:
    """Yield the names that `NamedTuple(...)`, `namedtuple(...)` or `setattr(...)` defines."""
    kind = last_name(call.func)
    if kind == "setattr" and len(call.args) == 3:
        yield from ((call.lineno, "attribute", text) for text in texts(call.args[1:2]))
    elif kind == "NamedTuple" and len(call.args) == 2 and isinstance(call.args[1], ast.List | ast.Tuple):
        pairs = [pair for pair in call.args[1].elts if isinstance(pair, ast.Tuple)]
        yield from ((call.lineno, "field", text) for pair in pairs for text in texts(pair.elts[:1]))
    elif kind == "namedtuple" and len(call.args) >= 2:
        parts = call.args[1].elts if isinstance(call.args[1], ast.List | ast.Tuple) else call.args[1:2]
        yield from ((call.lineno, "field", name) for text in texts(parts) for name in re.findall(r"\w+", text))


def texts(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def last_name(node: ast.expr) -> str:
    """Return `Struct` for `Struct`, `msgspec.Struct` and `Struct[int]`."""
    match node:
        case ast.Subscript(value=value):
            return last_name(value)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def is_on_wire(node: ast.ClassDef) -> bool:
    return any(last_name(base) in WIRE_BASES for base in node.bases)


def vague_word(kind: str, name: str) -> str | None:
    """Return the word for which a name is refused, or None."""
    words = words_of(name)
    if len(words) == 1 and (words[0] in WORDS or (kind != "variable" and words[0] in NOT_AS_DEFINITIONS)):
        return words[0]
    return next((word for word in words if word in IN_COMPOUNDS), None)


def check_names(sources: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield the word and the message of each name that is refused. sources: trees by paths in the package"""
    folders = {part for path in sources for part in Path(path).parent.parts}
    paths = [(path, Path(path).stem) for path in sources] + [(folder, folder) for folder in sorted(folders)]
    for path, part in paths:
        if (word := vague_word("file", part)) is not None:
            yield word, f"{path}: name it by the noun of its domain"
    for path, tree in sources.items():
        for line, kind, name in names(tree):
            if (word := vague_word(kind, name)) is not None:
                yield word, f"{path}:{line}: {kind} {name}: name it by the noun of its domain"


def check_docstrings(sources: dict[str, ast.Module]) -> list[str]:
    """Return a message for each docstring with one of PHRASES."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        f"{path}:{getattr(node, 'lineno', 1)}: docstring: {phrase}: name the parameter"
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for phrase in PHRASES
        if phrase in (ast.get_docstring(node) or "")
    ]


def check_allowed(found_words: list[tuple[str, str]], allowed: dict[str, int]) -> list[str]:
    """Return the messages of words that are used more often, or less often, than allowed."""
    counts, wrong = Counter(word for word, _ in found_words), list[str]()
    for word, n in counts.items():
        if n > allowed.get(word, 0):
            wrong += [message for other, message in found_words if other == word]
    wrong += [
        f"tools/name_lint.py: ALLOWED[{word!r}] is {n}, {counts[word]} are left: lower it"
        for word, n in allowed.items()
        if counts[word] < n
    ]
    return wrong


def check_classes(sources: dict[str, ast.Module]) -> list[str]:
    """Return a message for each name that two classes at module level have."""
    classes = defaultdict[str, list[str]](list)
    for path, tree in sources.items():
        if not path.startswith(EXTERNAL):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(f"{path}:{node.lineno}")
    return [f"{places[1]}: class {name} is also {places[0]}" for name, places in classes.items() if len(places) > 1]


def main() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    sources = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}
    wrong = check_allowed([*check_names(sources)], ALLOWED) + check_classes(sources) + check_docstrings(sources)
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
