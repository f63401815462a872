"""Element-wise expressions: every operation against float64, operands of every kind, and the code's own limits."""

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.graph.expressions import BINARY, UNARY, Tree, evaluate, formula, substitute
from millrace.kernels.declare import Param
from millrace.kernels.expression import OPERATIONS, TooComplexError, compile_tree, tree_of
from tests.support.one_step import Machine, run_kernel
from tests.support.tolerance import assert_no_worse


def run(tree: Tree, inputs: list[NDArray[np.float32]], n: int, machine: Machine) -> NDArray[np.float32]:
    """Inputs of shape (M, n), or (n,) for all rows."""
    M = next(len(x) for x in inputs if x.ndim == 2)
    code, numbers = compile_tree(tree, len(inputs))
    names = "abcd"[: len(inputs)]
    strides = {f"{name}_stride": n if x.ndim == 2 else 0 for name, x in zip(names, inputs, strict=True)}
    operands = {**dict(zip(names, inputs, strict=True)), "y": np.zeros((M, n), np.float32)}
    params: dict[str, Param] = {"rows": 0, "n": n, "code": code, "imm": numbers, **strides}
    return run_kernel("elementwise", operands, params, [M], machine)["y"].view(np.float32).reshape(M, n)


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("n", [1, 17, 255, 256, 257])
def test_unary(op: str, n: int, machine: Machine) -> None:
    x = np.random.default_rng([7, n]).uniform(-20, 20, (3, n)).astype(np.float32)
    x = np.abs(x) if op == "sqrt" else x
    got, exact = run((op, 0), [x], n, machine), evaluate((op, 0), [x.astype(np.float64)])
    scale = np.abs(exact) if op == "exp" else np.ones_like(exact)
    tolerance = {"exp": 3e-7, "sigmoid": 3e-7, "tanh": 3e-7, "erf": 1.2e-7, "sqrt": 6e-7}.get(op, 0)
    assert (np.abs(got - exact) <= tolerance * scale).all()


def test_exp_at_its_ends(machine: Machine) -> None:
    x = np.array([[0, -0.0, -87.2, -87.4, -1e9, -np.inf, 88.7, 88.8, 1e9, np.inf, np.nan, 1e-30]], np.float32)
    y = run(("exp", 0), [x], x.shape[1], machine)[0]
    assert (y[[0, 1, 11]] == 1).all() and (y[[3, 4, 5]] == 0).all() and np.isinf(y[[7, 8, 9]]).all() and np.isnan(y[10])
    assert abs(y[2] / np.exp(-87.2) - 1) < 1e-4 and abs(y[6] / np.exp(np.float64(x[0, 6])) - 1) < 1e-6


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("rows", ["matrix", "vector"])
def test_binary(op: str, rows: str, machine: Machine) -> None:
    rng = np.random.default_rng(11)
    x = rng.standard_normal((4, 70), np.float32)
    y = rng.standard_normal((4, 70) if rows == "matrix" else 70, np.float32)
    assert (run((op, 0, 1), [x, y], 70, machine) == evaluate((op, 0, 1), [x, y])).all(), "one rounding: equal bits"


@pytest.mark.parametrize("op", [*UNARY, *BINARY])
def test_what_is_not_finite_stays_so(op: str, machine: Machine) -> None:
    """Every pair of numbers, infinities and NaN: as NumPy has it, whatever side they are on (relu is a maximum)."""
    x, y = (a.reshape(1, -1) for a in np.meshgrid(*[np.array([0, 2, -3, np.inf, -np.inf, np.nan], np.float32)] * 2))
    tree, inputs = ((op, 0), [x]) if op in UNARY else ((op, 0, 1), [x, y])
    with np.errstate(all="ignore"):
        exact = evaluate(tree, [a.astype(np.float64) for a in inputs])
    got = run(tree, inputs, x.size, machine)
    assert (np.isnan(got) == np.isnan(exact)).all()
    assert np.allclose(got, exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    if op in ("max", "min"):
        number = run((op, 0, 0.0), [x], x.size, machine)
        assert (np.isnan(number) == np.isnan(x)).all()


@pytest.mark.parametrize("seed", range(12))
def test_random_expressions(seed: int, machine: Machine) -> None:
    """The register allocation, on trees with shared parts, numbers and up to four inputs."""
    rng = np.random.default_rng(seed)
    inputs = [rng.uniform(0.5, 2, (2, 33)).astype(np.float32) for _ in range(int(rng.integers(1, 5)))]
    trees: list[Tree] = [*range(len(inputs)), 0.5, 1.0, 2.0]
    for _ in range(int(rng.integers(1, 7))):
        op = str(rng.choice([*BINARY, "exp", "sigmoid", "abs"]))
        picked = [trees[int(i)] for i in rng.integers(0, len(trees), 2 if op in BINARY else 1)]
        trees.append(("sigmoid", (op, *picked)))
    tree: Tree = ("add", trees[-1], 0)
    got = run(tree, inputs, 33, machine)
    exact = evaluate(tree, [x.astype(np.float64) for x in inputs])
    again = tree_of(*compile_tree(tree, len(inputs)), len(inputs))
    assert (evaluate(again, [x.astype(np.float64) for x in inputs]) == exact).all(), "the code is the tree"
    assert_no_worse(got, evaluate(tree, inputs).astype(np.float32), exact)


WRITTEN: list[tuple[Tree, str]] = [
    (0, "a"),
    (("mul", 0, 0), "a^2"),
    (("mul", ("mul", 0, 0), ("mul", 0, 0)), "(a^2)^2"),
    (("max", 0, 0.0), "max(a, 0)"),
    (("sub", 0, ("sub", 1, 2)), "a - (b - c)"),
    (("sub", ("sub", 0, 1), 2), "a - b - c"),
    (("div", 0, ("mul", 1, 2)), "a / (b * c)"),
    (("mul", ("add", 0, 1), ("add", 0, 1)), "(a + b)^2"),
    (("neg", ("add", 0, 1)), "-(a + b)"),
    (("sub", 0, ("neg", 1)), "a - (-b)"),
    (("mul", 0, -2.5), "a * (-2.5)"),
    (("neg", ("mul", 0, 0)), "-a^2"),
    (("div", 1.0, ("add", 1.0, ("exp", ("neg", 0)))), "1 / (1 + exp(-a))"),
]


@pytest.mark.parametrize(("tree", "expected"), WRITTEN)
def test_a_formula_means_what_its_tree_means(tree: Tree, expected: str) -> None:
    """Python, whose rules of precedence are those of paper, reads the same in it."""
    assert formula(tree, "abc") == expected
    numbers = dict(zip("abc", (np.array([x]) for x in (1.5, 0.75, 3.0)), strict=True))
    read = eval(expected.replace("^", "**").replace("max", "maximum"), {**vars(np), **numbers})
    assert read == evaluate(tree, list(numbers.values()))


def test_a_square_is_one_of_a_shared_part_and_long_formulas_are_cut() -> None:
    part: Tree = ("add", 0, 1.0)
    assert formula(("mul", part, part), "x") == "(x + 1)^2" and formula(("mul", ("mul", 0, 0), 0), "x") == "x^2 * x"
    for _ in range(28):  # each twice the one before: in full, a gigabyte
        part = ("sub", part, part)
    assert "..." in formula(part, "x") and len(formula(part, "x")) < 500


def test_an_input_is_not_a_number() -> None:
    """Input 1 and the number 1.0 are equal in Python and must not be mixed up."""
    x, y = np.full((1, 4), 3, np.float32), np.full((1, 4), 5, np.float32)
    for machine in (Machine("scalar"),):
        assert (run(("add", ("mul", 0, 1), 1.0), [x, y], 4, machine) == 16).all()


def test_what_does_not_fit_says_so() -> None:
    tree: Tree = 0
    for i in range(30):
        tree = ("add", tree, float(i))
    with pytest.raises(TooComplexError):
        compile_tree(tree, 1)


def test_what_a_graph_may_say_is_what_kernels_know() -> None:
    assert {*UNARY, *BINARY} == {*OPERATIONS} - {"end", "immediate"}


def test_substitute_replaces_inputs() -> None:
    assert substitute(("add", 0, ("mul", 1, 2.0)), [1, ("exp", 0)]) == ("add", 1, ("mul", ("exp", 0), 2.0))
