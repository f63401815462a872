"""What keeps the house as it was drawn: the import order, the size of files and functions, the public surface."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import millrace
from millrace import errors
from millrace.compile.settings import BuildSettings
from millrace.runtime.settings import RunSettings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "millrace"
PUBLIC = [
    "LLM",
    "MillraceError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]  # changing this is a CHANGELOG line

ORDER = [
    "errors",
    "env",
    "settings",
    "prometheus",
    "protobuf",
    "machine",
    "report",
    "checkpoint",
    "graph",
    "model",
    "kernels",
    "engine",
    "compile",
    "runtime",
    "evaluate",
    "compress",
    "tune",
    "api",
    "model_repository",
    "serve",
    "bench",
    "size",
    "cli",
]
# model/ and graph/ know nothing of kernels; the native binding is in kernels/, beside what it binds.
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 400, 60, 8
# Files that are one thing and would not be clearer in two.
GENERATED = "src/millrace/checkpoint/config/declared_keys.py"  # grows with every family
LONGER = {
    "src/millrace/runtime/loop.py",
    "src/millrace/runtime/service.py", "src/millrace/runtime/scheduling/scheduler.py",
    "src/millrace/runtime/request/sampling_params.py", "src/millrace/kernels/attention/cuda.py",
    "src/millrace/serve/http/connection.py", "src/millrace/model_repository/models/backend_model.py",
}  # fmt: skip
MAX_LONGER = 500
MAX_FOLDER = 20  # files, __init__.py included


@cache
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def edges() -> Iterator[tuple[str, str, Path]]:
    """(importing room, imported room, file)"""
    for path, tree in modules():
        here = room(path.relative_to(PACKAGE).parts)
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            for name in names:
                if name.startswith("millrace."):
                    yield here, name.split(".")[1], path


def test_imports_point_upstream() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {a} imports {b}"
        for a, b, path in edges()
        if a in ORDER and (b not in ORDER or ORDER.index(b) > ORDER.index(a))
    ]
    assert not wrong, "\n".join([*wrong, "a room imports only rooms above it; move the shared type upstream"])


def imported(tree: ast.Module, names: set[str], of: str = "") -> set[str]:
    """Modules among `names` that are imported anywhere in the file, inside functions and for types, too. of: its own"""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = f"{of.rsplit('.', node.level)[0]}.{node.module}" if node.level else node.module
            found |= {module, *(f"{module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & names


def in_circles(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Modules that are left when all go, again and again, that import none of the others or that none imports."""
    left, before = dict(edges), -1
    while len(left) != before:
        before = len(left)
        imported_here = set().union(*left.values())
        left = {m: to & left.keys() for m, to in left.items() if to & left.keys() and m in imported_here}
    return left


def test_no_room_has_an_import_circle() -> None:
    """An import inside a function hides a circle and does not open it: it counts like any other."""
    trees = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): tree for path, tree in modules()}
    edges = {name: imported(tree, set(trees), name) - {name} for name, tree in trees.items()}
    ring = {"a": {"b", "e"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": set[str]()}
    assert in_circles(ring).keys() == {"a", "b", "c"}
    assert not in_circles(edges), "what both need goes into a module of its own, or one of them is handed it"


def test_model_configuration_stands_alone() -> None:
    """config.pbtxt is read and checked without anything else of the model repository."""
    trees = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): tree for path, tree in modules()}
    here = "millrace.model_repository."
    wrong = [
        f"{name} imports {other}"
        for name, tree in trees.items()
        if name.startswith(f"{here}config.")
        for other in imported(tree, set(trees), name)
        if other.startswith(here) and not other.startswith(f"{here}config")
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_by_name_stay_in_their_room() -> None:
    """No edge is seen where a module is imported by its name: four places do it, two of them within their room, and the
    last one, which is given names of packages, never of ours.
    """
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in modules()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.Name) and node.id in ("import_module", "__import__"))
    }
    outside = "model_repository/backends/framework_backend.py"
    assert found == {"__init__.py", "cli/main.py", "kernels/catalogue.py", outside}
    asked = [
        node.args[0]
        for path, tree in modules()
        if path.parent == (PACKAGE / outside).parent
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_package"
    ]
    names = [node.value for node in asked if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert len(names) == len(asked) > 5 and not any(name.startswith("millrace") for name in names), names


def test_every_room_has_its_place() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms - {"__init__", "__main__"} == set(ORDER), "a room belongs into ORDER, and nothing else does"


def test_files_and_functions_stay_readable() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.hpp"), *(ROOT / "native").glob("*.[ch]pp")]
    for folder in ("tests", "benchmarks", "tools", "examples"):
        sources += (ROOT / folder).rglob("*.py")
    long = {str(p.relative_to(ROOT)): n for p in sources if (n := len(p.read_text().splitlines())) > MAX_FILE}
    long.pop(GENERATED, None)
    assert long.keys() == LONGER, "a file grew beyond its budget, or is no exception any more"
    assert max(long.values()) <= MAX_LONGER, long
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION, f"{place} is longer than {MAX_FUNCTION} lines"
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")])
            if any(ast.unparse(d).partition("(")[0] == "triton.jit" for d in node.decorator_list):
                continue  # a kernel's are its operands, and what it is compiled for
            if path.name == "ops.py" and path.parent.name == "model":
                continue  # an operator's are its operands and attributes
            assert count <= MAX_PARAMETERS, f"{place} has {count} parameters"


def test_folders_stay_small() -> None:
    files = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert max(files.values()) <= MAX_FOLDER, files.most_common(3)


def test_every_module_says_what_it_is() -> None:
    silent = [str(p.relative_to(ROOT)) for p, tree in modules() if tree.body and not ast.get_docstring(tree)]
    assert not silent, f"no docstring: {silent}"


def test_the_public_surface_is_pinned() -> None:
    assert sorted(millrace.__all__) == PUBLIC
    assert all(hasattr(millrace, name) for name in PUBLIC)


def test_errors_are_few() -> None:
    kinds = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.MillraceError)]
    assert len(kinds) <= 10 and all(c.__doc__ for c in kinds)


def test_only_env_reads_the_environment() -> None:
    for path, tree in modules():
        if path.name != "env.py":
            for node in ast.walk(tree):
                assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")), path


def test_settings_say_what_they_are() -> None:
    from dataclasses import fields

    from millrace.settings import declared

    for settings in (BuildSettings, RunSettings):
        assert len(fields(settings)) <= 12
        assert all(declared(f).help for f in fields(settings))


def test_what_runs_alone_is_where_make_looks_for_it() -> None:
    """The second half of `make test` collects this folder alone: all of the suite takes ten seconds to collect."""
    mark, folder = ".mark." + "alone", ROOT / "tests" / "bench"
    assert "(TEST_FLAGS) tests/bench\n" in (ROOT / "Makefile").read_text()
    marked = [path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()]
    assert marked and all(path.is_relative_to(folder) for path in marked), marked
