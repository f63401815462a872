"""Each pass on a small graph: what was there before, what is there after."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.lower_cpu.program_builder import lower
from millrace.compile.passes.expressions import fold_constants, fuse_elementwise, gather_early
from millrace.compile.passes.fusions import fuse_convert, fuse_residual
from millrace.compile.passes.pipeline import Pass, pipeline, run_passes
from millrace.compile.passes.products import merge_gated, merge_linears
from millrace.compile.precision import check_x_group, precision_map
from millrace.engine.cache_specs import KvFormat
from millrace.errors import CheckpointError, ConfigError, GraphError
from millrace.graph.rewrite import listing
from millrace.graph.types import Constant, DType, Graph, Node, Port, Symbol, Value
from millrace.graph.verify import verify
from millrace.kernels.catalogue import operators
from millrace.kernels.declare import RowFormat
from millrace.kernels.matmul.op import group_of
from millrace.kernels.precision import Precision
from millrace.kernels.row_storage import storage_of
from millrace.model import ops
from millrace.model.layers import Embedding, Linear, RMSNorm
from millrace.model.module import DECODER, Module, ModuleList, Parameter, Weights, trace_model
from millrace.model.tensor import Tensor

N = 32
T, R = Symbol("T"), Symbol("R")


def shapes(model: Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(d for d in p.shape if isinstance(d, int)) for name, p in model.parameters()}


def ones(model: Module) -> Weights:
    sizes = shapes(model)

    def load(name: str) -> NDArray[np.float32]:
        return np.ones(sizes[name], np.float32)

    return Weights(sizes, load)


class Small(Module):
    """Embedding, whatever `body` does with two linear layers and a norm, and a head."""

    signature = DECODER

    def __init__(self, body: "Callable[[Small, Tensor], Tensor]") -> None:
        self.embed = Embedding(7, N)
        self.one, self.two = Linear(N, N), Linear(N, N, bias=True)
        self.norm = RMSNorm(N, 1e-5, offset=1.0)
        self.lm_head = Linear(N, 7)
        self._body = body

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        x = self._body(self, self.embed(tokens))
        return self.lm_head(ops.gather_rows(x + self.one(x) + self.two(self.norm(x)), rows))


def traced(body: "Callable[[Small, Tensor], Tensor]") -> Graph:
    model = Small(body)
    return run_passes(trace_model(model, ones(model), operators()), [("fold_constants", fold_constants)])


def count(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes)


def precise(graph: Graph, name: str = "fp32") -> Graph:
    return run_passes(graph, [p for p in pipeline(precision_map(name)) if p[0] == "choose_precision"])


def test_constants_are_folded_when_loaded() -> None:
    graph = traced(lambda m, x: x)
    norm = next(n for n in graph.nodes if n.op == "rms_norm")
    constant = norm.inputs[1].constant
    assert constant and constant.origin == ("norm.weight",) and (constant.load() == 2).all()


def test_only_gathered_rows_are_normalised() -> None:
    class Normed(Small):
        def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
            return self.lm_head(ops.gather_rows(self.norm(self.embed(tokens)), rows))

    model = Normed(lambda m, x: x)
    graph = gather_early(trace_model(model, ones(model), operators()))
    assert [n.op for n in graph.nodes if n.op != "elementwise"] == ["embedding", "gather_rows", "rms_norm", "linear"]


def test_expressions_grow_together() -> None:
    graph = traced(lambda m, x: ops.gelu_tanh(x))
    assert count(graph)["elementwise"] > 8
    fused = fuse_elementwise(graph)
    assert count(fused)["elementwise"] == 2, listing(fused)  # GELU, read three times, and the sum of three


def test_an_expression_read_twice_stays() -> None:
    def body(m: Small, x: Tensor) -> Tensor:
        y = ops.sigmoid(x)
        return m.norm(y) + m.one(y)

    assert count(fuse_elementwise(traced(body)))["elementwise"] == 3


def test_gate_and_up_are_merged() -> None:
    class Gated(Small):
        def __init__(self) -> None:
            super().__init__(lambda m, x: ops.silu(m.gate(x)) * m.up(x))  # type: ignore[attr-defined]
            self.gate, self.up = Linear(N, N), Linear(N, N)

    model = Gated()
    graph = precise(
        fuse_elementwise(run_passes(trace_model(model, ones(model), operators()), [("fold", fold_constants)]))
    )
    merged = merge_gated(graph, precision_map("w8a8"))
    assert count(merged)["gated_linear"] == 1 and count(merged)["linear"] == count(graph)["linear"] - 2
    assert next(n for n in merged.nodes if n.op == "gated_linear").origin == ("gate", "up")


def test_linears_of_one_input_are_merged_with_their_biases() -> None:
    graph = precise(traced(lambda m, x: m.one(x) - m.two(x)))
    merged = merge_linears(graph, precision_map("w8a8"))
    assert count(merged)["linear"] == count(graph)["linear"] - 1 and count(merged)["split"] == 1
    linear = next(n for n in merged.nodes if n.attrs.get("bias") and n.outputs[0].width == 2 * N)
    bias = linear.inputs[2].constant
    assert bias and bias.load().tolist() == [0.0] * N + [1.0] * N


def test_residuals_go_into_the_product() -> None:
    graph = precise(traced(lambda m, x: x))
    fused = fuse_residual(graph)
    assert count(fused)["elementwise"] == 0 and sum(bool(n.attrs.get("residual")) for n in fused.nodes) == 2


def before(name: str, passes: list[tuple[str, Pass]]) -> list[tuple[str, Pass]]:
    return passes[: [n for n, _ in passes].index(name)]


@pytest.mark.parametrize(("precision", "n"), [("bf16", 1), ("w8a16", 1), ("w8a8", 0), ("fp32", 0)])
def test_a_product_packs_for_its_only_reader(precision: str, n: int) -> None:
    """To bfloat16, of which a row is its elements side by side."""
    passes = pipeline(precision_map(precision, group=16))
    graph = run_passes(traced(lambda m, x: m.two(m.one(x))), before("fuse_convert", passes))
    fused = fuse_convert(graph)
    packed = [node for node in fused.nodes if node.op == "linear" and storage_of(node).format == RowFormat.BF16]
    norm = int(precision != "fp32")  # which packs, too
    assert count(fused)["convert"] == count(graph)["convert"] - n - norm and len(packed) == n


def test_a_norm_packs_for_its_only_reader() -> None:
    passes = pipeline(precision_map("w4a8", group=16))
    graph = run_passes(traced(lambda m, x: x), before("fuse_convert", passes))
    fused = fuse_convert(graph)
    assert count(fused)["convert"] == count(graph)["convert"] - 1
    assert storage_of(next(n for n in fused.nodes if n.op == "rms_norm")).format == RowFormat.HADAMARD_Q8


def test_products_of_other_groups_are_not_merged() -> None:
    """One product reads one kind of rows; its weights stay in groups of their own."""

    def kinds(asked: dict[str, str]) -> list[tuple[int, int]]:
        passes = pipeline(precision_map(asked, group=16))
        graph = run_passes(traced(lambda m, x: ops.silu(m.one(x)) * m.two(x)), passes)
        rows = {v: storage_of(n).group for n in graph.nodes for v in n.outputs}
        found = [n for n in graph.nodes if {"one", "two"} & set(n.origin) and "precision" in n.attrs]
        return [(group_of(n), rows[n.inputs[0]]) for n in found]

    assert kinds({"default": "w8a8:8"}) == [(16, 8)] * 3  # one and two of x, and each of something else
    assert sorted(kinds({"default": "w8a8", "one": "w8a8:8"})) == [(16, 8)] * 2 + [(16, 16)] * 2
    with pytest.raises(ConfigError, match="groups of 32 beside weights in groups of 16") as caught:
        kinds({"default": "w8a8:32"})
    assert caught.value.expected.endswith(": 8")
    with pytest.raises(ConfigError) as caught:
        check_x_group("x", 8, 12)
    assert caught.value.expected.endswith("none here")


class Scored(Module):
    """A head of any name, with `finish` between it and the logits."""

    signature = DECODER

    def __init__(self, name: str, finish: Callable[[Tensor], Tensor]) -> None:
        self.embed = Embedding(40, N)
        self.lm_head = Linear(N, N)  # not the head, whatever it is called
        self._finish, self._name = finish, name
        setattr(self, name, Linear(N, 40))

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        head = getattr(self, self._name)
        return self._finish(head(ops.gather_rows(self.lm_head(self.embed(tokens)), rows)))


def precisions_of(model: Module, asked: str | dict[str, str], head: str | None = None) -> dict[str, object]:
    """The kind and precision of each product behind all passes, by its layer."""
    graph = run_passes(trace_model(model, ones(model), operators()), pipeline(precision_map(asked, 16, head)))
    found = [n for n in graph.nodes if "precision" in n.attrs]
    return {f"{n.origin[0]} {n.op}": str(n.attrs["precision"]) for n in found}


@pytest.mark.parametrize("name", ["head", "output_projection"])
def test_the_head_is_what_gives_the_logits(name: str) -> None:
    """By what it is, not by its name."""
    plain = Scored(name, lambda x: x)
    rescored = {"lm_head linear": "w4a8", f"{name} linear": "w4a8", f"{name} rescore": "w8a8"}
    assert precisions_of(plain, "w4a8", head="w4a8") == rescored
    assert precisions_of(plain, "w4a8") == {"lm_head linear": "w4a8", f"{name} linear": "w8a8"}
    assert precisions_of(plain, "w4a16") == {"lm_head linear": "w4a16", f"{name} linear": "w8a16"}
    for head in ({"asked": "w4a8", "head": "bf16"}, {"asked": {"default": "w4a8", name: "bf16"}}):
        assert precisions_of(plain, **head) == {"lm_head linear": "w4a8", f"{name} linear": "bf16"}
    capped = Scored(name, lambda x: 30.0 * ops.tanh(x / 30.0))
    assert precisions_of(capped, "w4a16") == {"lm_head linear": "w4a16", f"{name} linear": "w8a16"}
    with pytest.raises(ConfigError, match="twice"):
        precisions_of(plain, {"default": "w4a8", name: "bf16"}, head="w8a8")


@dataclass
class Ids:
    """The inputs of a language model beside its tokens."""

    positions: Tensor
    lengths: Tensor
    rows: Tensor


class Wrong(Module):
    signature = DECODER

    def __init__(self, body: Callable[["Wrong", Tensor, Ids], object]) -> None:
        self.embed, self.table = Embedding(7, N), Parameter(5)
        self._body = body

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        return self._body(self, self.embed(tokens), Ids(positions, lengths, rows))  # type: ignore[return-value]


def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = x.reshape(T, 4, 8)
    return heads, heads, heads


def attend(x: Tensor, i: Ids, q: tuple[int, int], k: tuple[int, int], v: tuple[int, int]) -> Tensor:
    return ops.attention(x.reshape(T, *q), x.reshape(T, *k), x.reshape(T, *v), i.positions, i.lengths)


WRONG: list[tuple[Callable[[Wrong, Tensor, Ids], object], str]] = [
    (lambda m, x, i: ops.linear(x, m.table), "x \\[T, 32\\] and w \\[5\\]"),
    (lambda m, x, i: x + m.table, "equal shapes"),
    (lambda m, x, i: ops.rms_norm(x, m.table, 1e-5), "a weight as long"),
    (lambda m, x, i: ops.layer_norm(x, m.table, m.table, 1e-5), "weight \\[N\\] and bias"),
    (lambda m, x, i: x.reshape(T, 3, 11), "as many elements"),
    (lambda m, x, i: attend(x, i, (4, 8), (4, 8), (8, 4)), "v \\[T, K, values"),
    (lambda m, x, i: attend(x, i, (2, 16), (1, 32), (1, 32)), "v \\[T, K, values"),
    (lambda m, x, i: attend(x, i, (8, 4), (8, 4), (8, 4)), "multiple of 8"),
    (lambda m, x, i: attend(x, Ids(i.rows, i.lengths, i.rows), (4, 8), (4, 8), (4, 8)), "one for each of its rows"),
    (lambda m, x, i: ops.full_attention(*three(x), x), "the tokens of each sequence"),
    (lambda m, x, i: ops.gather_rows(x, x), "i32 rows"),
    (lambda m, x, i: ops.mean_rows(x, x), "i32 lengths"),
    (lambda m, x, i: ops.embedding(x, m.embed.weight), "i32 ids"),
    (lambda m, x, i: (x, x), "a tensor for each of logits"),
    (lambda m, x, i: None, "gives NoneType"),
]


@pytest.mark.parametrize("body, names", WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_model_says_where(body: Callable[[Wrong, Tensor, Ids], object], names: str) -> None:
    model = Wrong(body)
    with pytest.raises(GraphError, match=names):
        trace_model(model, ones(model), operators())


def deep(levels: int) -> object:
    tree: object = 0
    for _ in range(levels):
        tree = ("add", tree, tree)
    return tree


ILLEGAL_TREES: list[tuple[object, str]] = [
    (("silu", 0), "the operation 'silu'"), (("ad", 0, 1), 'did you mean "add"'), (("immediate", 0), "immediate"),
    (("add", 0), "add of 1 operands"), (("exp", 0, 1), "exp of 2 operands"), (("add", 0, 1, 0), "add of 3"),
    (("add", 0, 2), "an input 2"), (("mul", -1, 0), "an input -1"), (("add", 0, True), "has True"),
    (("add", 0, "1"), "has '1'"), (("add", 0, ("exp",)), "exp of 0"), ((), "has \\(\\)"), (None, "has None"),
    (("neg", ["exp", 0]), "has \\["), (deep(32), "more than 32 levels"), ("x" * 10000, "an input, a number"),
]  # fmt: skip


@pytest.mark.parametrize("tree, says", ILLEGAL_TREES, ids=[says for _, says in ILLEGAL_TREES])
@pytest.mark.parametrize("op", ["elementwise", "gated_linear"])
def test_trees_are_verified(op: str, tree: object, says: str) -> None:
    """A pass that writes an expression which no kernel knows is caught behind it, not in a kernel."""
    x, w = Value((T, N)), Value((N, N), constant=Constant(lambda: np.zeros((N, N)), ("w",)))
    inputs = (x, x) if op == "elementwise" else (x, w, w)
    precision = {} if op == "elementwise" else {"precision": Precision.FP32}
    node = Node(operators()[op], inputs, (Value((T, N)),), {"tree": tree, **precision})
    with pytest.raises(GraphError, match=says) as error:
        verify(Graph((Port("x", x),), (Port("y", node.output),), (node,)), after="a pass")
    assert len(str(error.value)) < 600


def test_legal_trees_pass() -> None:
    x = Value((T, N))
    for tree in (0, 1.5, deep(31), ("mul", ("sigmoid", 0), ("max", 1, -2.0))):
        node = Node(operators()["elementwise"], (x, x), (Value((T, N)),), {"tree": tree})
        verify(Graph((Port("x", x),), (Port("y", node.output),), (node,)), after="a pass")


def test_weights_must_fit_the_model() -> None:
    model = Small(lambda m, x: x)
    sizes = shapes(model)
    for changed, names in (
        ({k: v for k, v in sizes.items() if k != "one.weight"}, "one.weight"),
        ({**sizes, "one.weight": (N, 3)}, "by config.json"),
        ({**sizes, "extra.weight": (1,)}, "extra.weight"),
    ):
        with pytest.raises(CheckpointError, match=names):
            trace_model(model, Weights(changed, lambda name: np.ones(sizes[name], np.float32)), operators())


def test_any_rows_are_an_output() -> None:
    class Headless(Module):
        signature = DECODER

        def __init__(self) -> None:
            self.embed = Embedding(7, N)
            self.layers = ModuleList([Linear(N, N)])

        def forward(self, tokens: Tensor, positions: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
            x: Tensor = self.layers[0](self.embed(tokens))
            return x

    model = Headless()
    graph = run_passes(trace_model(model, ones(model), operators()), pipeline(precision_map("fp32")))
    program = lower(graph, dict.fromkeys(graph.symbols, Bounds(1, 2, 8)), KvFormat.F32, "f32")
    assert [slot.shape for slot in program.outputs] == [(T, N)]


def illegal_graphs() -> Iterator[tuple[str, Graph]]:
    x = Value((T, N))
    node = Node(operators()["elementwise"], (x, x), (Value((T, N)),), {"tree": ("add", 0, 1)})
    good = Graph((Port("x", x),), (Port("y", node.output),), (node,))
    assert verify(good, after="a pass") is good
    yield "2 outputs of the name 'y'", replace(good, outputs=good.outputs * 2)
    yield "2 inputs of the name 'x'", replace(good, inputs=(*good.inputs, Port("x", Value((T,), DType.I32))))
    yield "the name 'a b'", replace(good, outputs=(Port("a b", node.output),))
    yield "without outputs", replace(good, outputs=())
    yield "is computed by no node", replace(good, outputs=(Port("y", Value((T, N))),))
    yield "reads a value that nothing", replace(good, inputs=(Port("x", Value((T, N))),))
    yield "assigned twice", replace(good, nodes=(node, node))
    free = Value((Symbol("U"), N), constant=None)
    stray = Node(operators()["elementwise"], (free,), (Value((Symbol("U"), N)),), {"tree": 0})
    fixed = Constant(lambda: np.zeros((3, N)), ("w",))
    yield "reads a value", replace(good, nodes=(stray,))
    unbound = Node(operators()["gather_rows"], (x, Value((Symbol("U"),), DType.I32, fixed)), (Value((Symbol("U"), N)),))
    yield "a dimension U that no input has", replace(good, nodes=(unbound,))
    split = Node(operators()["split"], (x,), (Value((T, 8)), Value((T, 8))), {"widths": (8, N - 8)})
    yield "the operator gives \\[T, 8\\], \\[T, 24\\]", replace(good, nodes=(split,))


@pytest.mark.parametrize("says, graph", list(illegal_graphs()), ids=lambda x: x if isinstance(x, str) else "")
def test_an_illegal_graph_says_why(says: str, graph: Graph) -> None:
    with pytest.raises(GraphError, match=says):
        verify(graph, after="a pass")


def test_a_model_without_a_signature_says_so() -> None:
    model = Linear(N, N)
    with pytest.raises(GraphError, match="Linear has no signature"):
        trace_model(model, ones(model), operators())
