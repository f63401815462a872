"""Refuses names that do not say what they stand for, two public classes of one name, and vague phrases in docstrings.

python -m tools.name_lint

A participle or pronoun (`told`, `asked`, `beside`) names nothing: a class, function, parameter or variable is called by
the noun of its domain. A docstring names the parameter instead of "so many".
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("src/millrace")
WORDS = frozenset(
    [
        "told",
        "asked",
        "said",
        "known",
        "given",
        "kept",
        "found",
        "seen",
        "held",
        "made",
        "taken",
        "wanted",
        "written",
        "whole",
        "beside",
        "others",
        "brought",
        "drawn",
        "otherwise",
        "somebody",
        "nobody",
        "whoever",
        "mend",
    ]
)
IN_COMPOUNDS = frozenset(("told", "asked", "said", "wanted", "beside", "brought", "somebody"))
PHRASES = ("so many",)  # in docstrings
# Files, below PACKAGE, that still have a word or a phrase. This set only shrinks.
EXCEPTIONS = frozenset(
    [
        ("checkpoint/config/config_reader.py", "mend"),
        ("kernels/matmul/gpu_tiles.py", "so many"),
        ("model/layers.py", "so many"),
    ]
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
AS_PARAMETERS = frozenset(("of", "one", "why", "how", "most", "says", "keeps"))
# Names of external interfaces: Triton's protobuf messages, its Python API, schemas of openapi.json.
EXTERNAL = (
    "serve/llm/response_types.py",
    "model_repository/config/model_config.py",
    "model_repository/python_backend/stub/",
)


def names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, kind, name) of everything that a module defines."""
    fields = {
        id(field.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Struct" in ast.unparse(base) for base in node.bases)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }  # on the wire or in a file
    for node in ast.walk(tree):
        if id(node) in fields:
            continue
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, "class" if isinstance(node, ast.ClassDef) else "function", node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, "parameter", node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, "variable", node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, "variable", node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, "import", alias.asname) for alias in node.names if alias.asname)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, "attribute", node.attr


def vague_phrases(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, phrase) of every docstring that has one."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            line = node.body[0].lineno
            yield from ((line, phrase) for phrase in PHRASES if phrase in " ".join(text.split()).lower())


def is_vague(kind: str, name: str) -> bool:
    """Return whether a name says nothing about its object."""
    words = name.strip("_").lower()
    if words in WORDS or (kind == "parameter" and words in AS_PARAMETERS):
        return True
    return not IN_COMPOUNDS.isdisjoint(words.split("_"))


def main() -> None:
    wrong, classes = list[str](), defaultdict[str, list[str]](list)
    for path in sorted(PACKAGE.rglob("*.py")):
        tree, place = ast.parse(path.read_text()), path.relative_to(PACKAGE).as_posix()
        wrong += [
            f"{path}:{line}: {kind} {name}: name it by the noun of its domain"
            for line, kind, name in names(tree)
            if is_vague(kind, name) and (place, name) not in EXCEPTIONS
        ]
        wrong += [
            f"{path}:{line}: docstring: {phrase}: name the parameter"
            for line, phrase in vague_phrases(tree)
            if (place, phrase) not in EXCEPTIONS
        ]
        if place.startswith(EXTERNAL):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(f"{path}:{node.lineno}")
    wrong += [f"{places[1]}: class {name} is also {places[0]}" for name, places in classes.items() if len(places) > 1]
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
