"""Each pass on a small graph: what was there before, what is there after."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.compile.lower import Lowering
from millrace.compile.passes import (
    fold_constants,
    fuse_elementwise,
    fuse_norm_convert,
    fuse_residual,
    merge_gated,
    merge_linears,
    pipeline,
    run_passes,
    sample_early,
)
from millrace.compile.precision import precision_map
from millrace.engine.native import KvFormat
from millrace.errors import CheckpointError, ConfigError, GraphError
from millrace.graph.rewrite import listing
from millrace.graph.types import Constant, Graph, Node, T, Value
from millrace.graph.verify import verify
from millrace.kernels.encode import Limits
from millrace.kernels.precision import Precision
from millrace.model import ops
from millrace.model.layers import Embedding, Linear, RMSNorm
from millrace.model.module import Module, ModuleList, Parameter, Weights, trace_model
from millrace.model.tensor import Tensor

N = 32


def shapes(model: Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(d for d in p.shape if isinstance(d, int)) for name, p in model.parameters()}


def ones(model: Module) -> Weights:
    sizes = shapes(model)

    def load(name: str) -> NDArray[np.float32]:
        return np.ones(sizes[name], np.float32)

    return Weights(sizes, load)


class Small(Module):
    """Embedding, whatever `body` does with two linear layers and a norm, and a head."""

    def __init__(self, body: "Callable[[Small, Tensor], Tensor]") -> None:
        self.embed = Embedding(7, N)
        self.one, self.two = Linear(N, N), Linear(N, N, bias=True)
        self.norm = RMSNorm(N, 1e-5, offset=1.0)
        self.lm_head = Linear(N, 7)
        self._body = body

    def forward(self, tokens: Tensor) -> Tensor:
        x = self._body(self, self.embed(tokens))
        return self.lm_head(ops.sampled_rows(x + self.one(x) + self.two(self.norm(x))))


def traced(body: "Callable[[Small, Tensor], Tensor]") -> Graph:
    model = Small(body)
    return run_passes(trace_model(model, ones(model)), [("fold_constants", fold_constants)])


def count(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes)


def precise(graph: Graph, name: str = "fp32") -> Graph:
    return run_passes(graph, [p for p in pipeline(precision_map(name)) if p[0] == "choose_precision"])


def test_constants_are_folded_when_loaded() -> None:
    graph = traced(lambda m, x: x)
    norm = next(n for n in graph.nodes if n.op == "rms_norm")
    constant = norm.inputs[1].constant
    assert constant and constant.origin == ("norm.weight",) and (constant.load() == 2).all()


def test_only_sampled_rows_are_normalised() -> None:
    class Normed(Small):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.lm_head(ops.sampled_rows(self.norm(self.embed(tokens))))

    model = Normed(lambda m, x: x)
    graph = sample_early(trace_model(model, ones(model)))
    assert [n.op for n in graph.nodes if n.op != "elementwise"] == ["embedding", "sampled_rows", "rms_norm", "linear"]


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
    graph = precise(fuse_elementwise(run_passes(trace_model(model, ones(model)), [("fold", fold_constants)])))
    merged = merge_gated(graph)
    assert count(merged)["gated_linear"] == 1 and count(merged)["linear"] == count(graph)["linear"] - 2
    assert next(n for n in merged.nodes if n.op == "gated_linear").origin == ("gate", "up")


def test_linears_of_one_input_are_merged_with_their_biases() -> None:
    graph = precise(traced(lambda m, x: m.one(x) - m.two(x)))
    merged = merge_linears(graph)
    assert count(merged)["linear"] == count(graph)["linear"] - 1 and count(merged)["slice"] == 2
    linear = next(n for n in merged.nodes if n.attrs.get("bias") and n.output.width == 2 * N)
    bias = linear.inputs[2].constant
    assert bias and bias.load().tolist() == [0.0] * N + [1.0] * N


def test_residuals_go_into_the_product() -> None:
    graph = precise(traced(lambda m, x: x))
    fused = fuse_residual(graph)
    assert count(fused)["elementwise"] == 0 and sum(bool(n.attrs.get("residual")) for n in fused.nodes) == 2


def test_a_norm_packs_for_its_only_reader() -> None:
    passes = pipeline(precision_map("w4a8", group=16))
    graph = run_passes(traced(lambda m, x: x), passes[:-3])
    fused = fuse_norm_convert(graph)
    assert count(fused)["convert"] == count(graph)["convert"] - 1
    assert next(n for n in fused.nodes if n.op == "rms_norm").output.storage.kind == "q8"


def test_precision_by_pattern() -> None:
    chosen = precision_map({"default": "w4a8", "layers.*.mlp.*": "w8a8", "lm_head": "bf16"})
    assert chosen.of("model.layers.3.mlp.up_proj") == Precision.W8A8
    assert chosen.of("model.layers.3.self_attn.q_proj") == Precision.W4A8
    assert chosen.of("lm_head", is_head=True) == Precision.BF16
    assert not chosen.rescores("lm_head")


def test_the_head_of_a_4_bit_engine() -> None:
    """In two steps, unless something else is asked for."""
    plain = precision_map("w4a8")
    assert plain.of("head", is_head=True) == Precision.W4A8 and plain.rescores("head")
    fixed = precision_map("w4a8", head="w8a8")
    assert fixed.of("head", is_head=True) == Precision.W8A8 and not fixed.rescores("head")
    assert fixed.of("head") == Precision.W4A8
    assert precision_map("w4a16").of("head", is_head=True) == Precision.W8A16
    assert not precision_map("w8a8").rescores("head")
    assert not precision_map({"default": "w4a8", "head": "w4a8"}).rescores("head")


class Scored(Module):
    """A head of any name, with `finish` between it and the logits."""

    def __init__(self, name: str, finish: Callable[[Tensor], Tensor]) -> None:
        self.embed = Embedding(40, N)
        self.lm_head = Linear(N, N)  # not the head, whatever it is called
        self._finish, self._name = finish, name
        setattr(self, name, Linear(N, 40))

    def forward(self, tokens: Tensor) -> Tensor:
        head = getattr(self, self._name)
        return self._finish(head(ops.sampled_rows(self.lm_head(self.embed(tokens)))))


def precisions_of(model: Module, asked: str | dict[str, str], head: str | None = None) -> dict[str, object]:
    """The kind and precision of each product behind all passes, by its layer."""
    graph = run_passes(trace_model(model, ones(model)), pipeline(precision_map(asked, 16, head)))
    found = [n for n in graph.nodes if "precision" in n.attrs]
    return {f"{n.origin[0]} {n.op}": str(n.attrs["precision"]) for n in found}


@pytest.mark.parametrize("name", ["head", "output_projection"])
def test_the_head_is_what_gives_the_logits(name: str) -> None:
    """By what it is, not by its name."""
    plain = Scored(name, lambda x: x)
    rescored = {"lm_head linear": "w4a8", f"{name} linear": "w4a8", f"{name} rescore": "w8a8"}
    assert precisions_of(plain, "w4a8") == rescored
    assert precisions_of(plain, "w4a16") == {"lm_head linear": "w4a16", f"{name} linear": "w8a16"}
    for head in ({"asked": "w4a8", "head": "bf16"}, {"asked": {"default": "w4a8", name: "bf16"}}):
        assert precisions_of(plain, **head) == {"lm_head linear": "w4a8", f"{name} linear": "bf16"}
    capped = Scored(name, lambda x: 30.0 * ops.tanh(x / 30.0))
    assert precisions_of(capped, "w4a16") == {"lm_head linear": "w4a16", f"{name} linear": "w8a16"}
    with pytest.raises(ConfigError, match="twice"):
        precisions_of(plain, {"default": "w4a8", name: "bf16"}, head="w8a8")


@pytest.mark.parametrize(
    "asked, names", [("w3a8", "w4a8"), ({"lm_head": "bf16"}, "default"), ({"default": "x"}, "bf16")]
)
def test_a_wrong_precision_says_what_there_is(asked: str | dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        precision_map(asked)


@pytest.mark.parametrize("group", [0, 3, 6, 8192])
def test_a_wrong_group_is_refused(group: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        precision_map("w4a8", group)


class Wrong(Module):
    def __init__(self, body: Callable[["Wrong", Tensor], object]) -> None:
        self.embed, self.table = Embedding(7, N), Parameter(5)
        self._body = body

    def forward(self, tokens: Tensor) -> Tensor:
        return self._body(self, self.embed(tokens))  # type: ignore[return-value]


WRONG: list[tuple[Callable[[Wrong, Tensor], object], str]] = [
    (lambda m, x: ops.linear(x, m.table), "x \\[T, 32\\] and w \\[5\\]"),
    (lambda m, x: x + m.table, "equal shapes"),
    (lambda m, x: ops.rms_norm(x, m.table, 1e-5), "a weight as long"),
    (lambda m, x: x.reshape(T, 3, 11), "as many elements"),
    (lambda m, x: ops.attention(x.reshape(T, 4, 8), x.reshape(T, 4, 8), x.reshape(T, 8, 4)), "k and v"),
    (lambda m, x: ops.attention(x.reshape(T, 2, 16), x.reshape(T, 1, 32), x.reshape(T, 1, 32)), "k and v"),
    (lambda m, x: ops.attention(x.reshape(T, 8, 4), x.reshape(T, 8, 4), x.reshape(T, 8, 4)), "multiple of 8"),
    (lambda m, x: ops.sampled_rows(ops.sampled_rows(x)), "x \\[T, width\\]"),
]


@pytest.mark.parametrize("body, names", WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_model_says_where(body: Callable[[Wrong, Tensor], object], names: str) -> None:
    model = Wrong(body)
    with pytest.raises(GraphError, match=names):
        trace_model(model, ones(model))


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
    node = Node(op, inputs, Value((T, N)), {"tree": tree, **precision})
    with pytest.raises(GraphError, match=says) as error:
        verify(Graph(x, (node,), node.output), after="a pass")
    assert len(str(error.value)) < 600


def test_legal_trees_pass() -> None:
    x = Value((T, N))
    for tree in (0, 1.5, deep(31), ("mul", ("sigmoid", 0), ("max", 1, -2.0))):
        node = Node("elementwise", (x, x), Value((T, N)), {"tree": tree})
        verify(Graph(x, (node,), node.output), after="a pass")


def test_weights_must_fit_the_model() -> None:
    model = Small(lambda m, x: x)
    sizes = shapes(model)
    for changed, names in (
        ({k: v for k, v in sizes.items() if k != "one.weight"}, "one.weight"),
        ({**sizes, "one.weight": (N, 3)}, "by config.json"),
        ({**sizes, "extra.weight": (1,)}, "extra.weight"),
    ):
        with pytest.raises(CheckpointError, match=names):
            trace_model(model, Weights(changed, lambda name: np.ones(sizes[name], np.float32)))


def test_a_model_without_a_head_is_refused() -> None:
    class Headless(Module):
        def __init__(self) -> None:
            self.embed = Embedding(7, N)
            self.layers = ModuleList([Linear(N, N)])

        def forward(self, tokens: Tensor) -> Tensor:
            x: Tensor = self.layers[0](self.embed(tokens))
            return x

    model = Headless()
    graph = run_passes(trace_model(model, ones(model)), pipeline(precision_map("fp32")))
    with pytest.raises(GraphError, match="sampled_rows"):
        Lowering(graph, Limits(8, 2), 64, KvFormat.F32, "f32").program()
