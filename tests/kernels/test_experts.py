"""The kernels of mixtures of experts: route, group_by_expert, matmul by experts, combine_experts."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.config.routing import Routing
from millrace.kernels.combine_experts.ref import combine_experts
from millrace.kernels.convert.ref import pack_rows
from millrace.kernels.declare import RowFormat, WeightFormat
from millrace.kernels.expression import compile_tree
from millrace.kernels.group_by_expert.ref import group_by_expert
from millrace.kernels.layout import row_bytes
from millrace.kernels.matmul.pack import pack_matrix
from millrace.kernels.route.declare import SCORINGS
from millrace.kernels.route.ref import route
from tests.kernels.test_matmul import CLASSES, multiply
from tests.support.one_step import Machine, as_bytes, i32, run_kernel
from tests.support.tolerance import assert_no_worse

ROUTINGS = {
    "mixtral": Routing(chosen=2, normalise=True),
    "qwen2_moe": Routing(chosen=4),
    "deepseek_v2": Routing(chosen=3, groups=4, chosen_groups=2, scale=16.0),
    "deepseek_v3": Routing(
        chosen=4, scoring="sigmoid", normalise=True, scale=2.5, epsilon=1e-20, groups=4, chosen_groups=2, group_best=2
    ),
    "llama4": Routing(chosen=1, scoring="sigmoid"),
    "phimoe": Routing(chosen=2, scoring="sparsemixer", epsilon=0.02),
    "all": Routing(chosen=64, scoring="sigmoid"),
}


def run_route(
    logits: NDArray[np.float32], bias: NDArray[np.float32] | None, routing: Routing, machine: Machine
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    T, E = logits.shape
    params = {
        "rows": 0, "n": E, "x_stride": E, "chosen": routing.chosen, "scoring": SCORINGS.index(routing.scoring),
        "normalise": int(routing.normalise), "groups": routing.groups, "chosen_groups": routing.chosen_groups,
        "group_best": routing.group_best, "scale": routing.scale, "epsilon": routing.epsilon,
    }  # fmt: skip
    empty = np.zeros((T, routing.chosen), np.float32)
    operands = {"x": logits, "bias": bias, "weights": empty, "experts": empty.astype(np.int32)}
    got = run_kernel("route", operands, params, [T], machine)
    return got["weights"].view("f4").reshape(T, -1), got["experts"].view("i4").reshape(T, -1)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("E", [100])
def test_route(name: str, with_bias: bool, E: int, machine: Machine) -> None:
    routing, rng = ROUTINGS[name], np.random.default_rng([E, with_bias])
    logits = rng.standard_normal((37, E), np.float32) * np.float32(1.5)
    logits[3] -= 40  # all far below zero
    bias = rng.standard_normal(E, np.float32) * np.float32(0.1) if with_bias else None
    weights, experts = run_route(logits, bias, routing, machine)
    wide_bias = None if bias is None else bias.astype(np.float64)
    exact, expected = route(logits.astype(np.float64), wide_bias, routing)
    assert (experts == expected).all()
    theirs, _ = route(logits, bias, routing)
    assert_no_worse(weights, theirs, exact)


def test_equal_scores_choose_the_first_experts(machine: Machine) -> None:
    weights, experts = run_route(np.zeros((2, 20), np.float32), None, Routing(chosen=3, normalise=True), machine)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert np.allclose(weights, 1 / 3)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_numbers_still_have_different_experts(scoring: str, bad: float, machine: Machine) -> None:
    """Their weights are NaN or not, and other rows are as ever."""
    logits = np.random.default_rng(1).standard_normal((3, 24), np.float32)
    good = run_route(logits, None, Routing(chosen=2, scoring=scoring, epsilon=0.02), machine)
    for row in (np.full(24, bad, np.float32), np.where(np.arange(24) == 5, bad, logits[1]).astype(np.float32)):
        changed = logits.copy()
        changed[1] = row
        weights, experts = run_route(changed, None, Routing(chosen=2, scoring=scoring, epsilon=0.02), machine)
        assert experts.min() >= 0 and experts.max() < 24 and (experts[:, 0] != experts[:, 1]).all()
        for mine, theirs in ((weights, good[0]), (experts, good[1])):
            assert (mine[[0, 2]] == theirs[[0, 2]]).all()


@pytest.mark.parametrize(("T", "A", "E"), [(1, 1, 1), (1, 8, 128), (40, 3, 7), (129, 2, 16)])
def test_group_by_expert(T: int, A: int, E: int, machine: Machine) -> None:
    rng = np.random.default_rng(T)
    experts = i32(np.stack([rng.permutation(E)[:A] for _ in range(T)]))
    operands = {"experts": experts, "row_of": i32(np.zeros(T * A)), "places": experts, "starts": i32(np.zeros(E + 1))}
    got = run_kernel("group_by_expert", operands, {"rows": 0, "chosen": A, "n": E}, [T], machine)
    row_of, places, starts = group_by_expert(experts, E)
    for name, expected in (("row_of", row_of), ("places", places), ("starts", starts)):
        assert (got[name].view(np.int32) == expected.reshape(-1)).all(), name
    by_place = experts.reshape(-1)[np.argsort(places.reshape(-1))]
    assert (np.diff(by_place) >= 0).all()
    assert all((row_of[starts[e] : starts[e + 1]] == np.flatnonzero((experts == e).any(1))).all() for e in range(E))


@pytest.mark.parametrize("n", [1, 16, 67])
def test_combine_experts(n: int, machine: Machine) -> None:
    rng = np.random.default_rng(n)
    x, weights = rng.standard_normal((30, n), np.float32), rng.standard_normal((10, 3), np.float32)
    places = i32(rng.permutation(30).reshape(10, 3))
    operands = {"x": x, "places": places, "weights": weights, "y": np.zeros((10, n), np.float32)}
    params = {"rows": 0, "rows_from": 1, "n": n, "x_stride": n, "chosen": 3}
    y = run_kernel("combine_experts", operands, params, [10, 30], machine)["y"].view("f4").reshape(10, n)
    exact = combine_experts(x.astype(np.float64), places, weights.astype(np.float64))
    assert_no_worse(y, combine_experts(x, places, weights), exact)
    outside = {**operands, "places": i32(np.where(np.arange(30).reshape(10, 3) == 4, 30, places))}
    z = run_kernel("combine_experts", outside, params, [10, 30], machine)["y"].view("f4").reshape(10, n)
    assert np.isnan(z[1]).all()
    assert (np.delete(z, 1, 0) == np.delete(y, 1, 0)).all()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("counts", "gated"), [((0, 5, 1, 29, 3), True), ((70, 0, 33), False)])
def test_each_expert_has_the_bits_of_its_own_product(
    kind: str, counts: tuple[int, ...], gated: bool, machine: Machine
) -> None:
    """Whatever the other experts' rows are: the product of one expert's rows alone has the same bits."""
    rng, K, N, group = np.random.default_rng(sum(counts)), 140, 64, 32
    weights = CLASSES[kind][1]
    group = group if weights in (WeightFormat.W8, WeightFormat.W4) else 0
    E, M = len(counts), sum(counts)
    x, w = rng.standard_normal((M, K), np.float32), rng.standard_normal((E, N, K), np.float32) * np.float32(0.05)
    bias, starts = rng.standard_normal((E, N), np.float32), i32([0, *np.cumsum(counts)])
    width = N // 2 if gated else N
    more: dict[str, Any] = {"tree": ("mul", ("mul", 0, ("sigmoid", 0)), 1), "width": width} if gated else {}
    y = np.concatenate([
        multiply(kind, x[starts[e] : starts[e + 1]], w[e], group, machine, bias=bias[e], **more)
        for e in range(E) if counts[e]
    ])  # fmt: skip
    got = experts_product(kind, x, w, starts, group, bias, machine, more)
    assert (got == y).all()


def experts_product(
    kind: str, x: NDArray[np.float32], w: NDArray[np.float32], starts: NDArray[np.int32], group: int,
    bias: NDArray[np.float32], machine: Machine, more: dict[str, Any],
) -> NDArray[np.float32]:  # fmt: skip
    format, weights = CLASSES[kind]
    (E, N, K), M = w.shape, len(x)
    code, numbers = compile_tree(more["tree"], 2) if more else ([], [])
    width: int = more["width"] if more else N
    operands = {
        "x": x if format == RowFormat.F32 else pack_rows(x, format, group), "starts": starts, "bias": bias,
        "w": np.concatenate([as_bytes(pack_matrix(part, weights, group)) for part in w]),
        "y": np.zeros((M, width), np.float32),
    }  # fmt: skip
    params = {
        "rows": 0, "n": N, "k": K, "group": group, "x_group": group, "format": format, "weights": weights,
        "x_stride": row_bytes(format, K, group), "y_stride": width, "gated": int(bool(more)),
        "tiles": int(kind.endswith("tiles")), "code": code, "imm": numbers, "experts": E,
    }  # fmt: skip
    return run_kernel("matmul", operands, params, [M], machine)["y"].view(np.float32).reshape(M, -1)


@pytest.mark.parametrize("starts", [[0, -5, 9], [0, 1 << 30, 9], [7, 3, 2], [-(1 << 31), 4, (1 << 31) - 1]])
def test_starts_that_contradict_each_other_stay_inside(starts: list[int], machine: Machine) -> None:
    """A program may compute them wrongly: nothing outside of the rows is read or written (run_kernel looks)."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((9, 40), np.float32), rng.standard_normal((2, 32, 40), np.float32)
    experts_product("f32", x, w, i32(starts), 0, np.zeros((2, 32), np.float32), machine, {})
