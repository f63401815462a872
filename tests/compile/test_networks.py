"""Networks that are no language model, through passes, lowering, the reference and the native core."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.passes.pipeline import run_passes, unfused
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from millrace.engine.executor import ExecutionError
from millrace.engine.native.executor import StatelessExecutor
from millrace.engine.reference.interpreter import Interpreter
from millrace.errors import ConfigError, EngineError, GraphError, RequestError
from millrace.graph.types import Constant, DType, Symbol, Value
from millrace.kernels.catalogue import operators
from millrace.kernels.layer_norm.ref import layer_norm
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import memory
from millrace.model import ops
from millrace.model.bert import BertSentences
from millrace.model.module import Module, Signature, trace_model
from millrace.model.tensor import Tensor
from millrace.runtime.memory_plan import plan_run
from tests.support.checkpoints import random_checkpoint
from tests.support.engines import build
from tests.support.networks import (
    IMAGES,
    SMALL,
    Arrays,
    Digits,
    encoder,
    network,
    packed,
    parameters,
    pixels,
    texts,
)
from tests.support.rounding import FIVE_SIGMA, product_deviation


def reference(model: Module, inputs: Arrays, precision: str = "fp32") -> Arrays:
    """Before any pass but the choice of precision."""
    source = Source.from_module(model, parameters(model))
    graph = run_passes(trace_model(source.module, source.weights, operators()), unfused(precision_map(precision, 32)))
    kv = KvFormat.F32 if precision == "fp32" else KvFormat.BF16
    found: Arrays = dict(Interpreter(graph, kv=kv, bf16_table=precision != "fp32").run(inputs))
    return found


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8", "w4a8"])
def test_an_mlp_on_floats(precision: str, fuse: bool, tmp_path: Path) -> None:
    """Of any number of rows, each with the bits that it has alone, on every instruction set."""
    engine = network(Digits(), tmp_path / "mlp", precision, IMAGES, fuse=fuse)
    inputs = pixels(40)
    exact = reference(Digits(), inputs)
    rounded = reference(Digits(), inputs, precision)
    allowed = rounding_of_digits(inputs, precision)
    for isa in usable_isas():
        for threads in (1, 2):
            loaded = engine.stateless_executor(isa=isa, threads=threads)
            whole = loaded.run(inputs)
            assert {n: a.shape for n, a in whole.items()} == {"scores": (40, 10), "hidden": (40, 30)}
            for name, got in whole.items():
                size = np.abs(exact[name]).max()
                assert (np.abs(got - exact[name]) <= allowed[name] + 2e-6 * size).all()
                flips = max(np.abs(rounded[name] - exact[name]).max(), 2e-6 * size)
                assert np.abs(got - rounded[name]).max() <= flips, "nearer to the reference than that to the truth"
                for n in (1, 7):
                    part = loaded.run({k: v[:n] for k, v in inputs.items()})[name]
                    assert (part == got[:n]).all()
            first = first_bits(loaded, inputs)
            assert first == first_bits(loaded, inputs)
            loaded.close()


def rounding_of_digits(inputs: Arrays, precision: str) -> Arrays:
    """Of each output, element by element: five standard deviations of what rounding does on the way."""
    p = {name: a.astype(np.float64) for name, a in parameters(Digits()).items()}
    x, weights = inputs["pixels"].astype(np.float64), np.abs(inputs["weights"])
    normed = layer_norm(x, p["norm.weight"], p["norm.bias"], 1e-5).astype(np.float64)
    before = product_deviation(normed, p["one.weight"], precision, 32)
    hidden = reference(Digits(), inputs)["hidden"].astype(np.float64)
    steepest = 1.13  # of GELU
    scores = product_deviation(hidden, p["two.weight"], precision, 32, steepest * before)
    return {"hidden": FIVE_SIGMA * steepest * before, "scores": FIVE_SIGMA * scores * weights}


def first_bits(loaded: StatelessExecutor, inputs: Arrays) -> bytes:
    return loaded.run(inputs)["scores"].tobytes()


def test_an_activation_is_computed_where_the_product_is(tmp_path: Path) -> None:
    source = Source.from_module(Digits(), parameters(Digits()))
    options = BuildOptions(precision=precision_map("fp32"), profile=IMAGES)
    calls = plan_engine(source, options).program.calls
    assert [c.kernel for c in calls] == ["layer_norm", "matmul", "matmul", "elementwise"]
    plain = plan_engine(source, BuildOptions(precision=precision_map("fp32"), profile=IMAGES, fuse=False)).program.calls
    assert len(plain) > 8


WRONG_INPUTS: list[tuple[Arrays, str]] = [
    ({}, "'pixels' is missing"),
    ({**pixels(3), "more": np.zeros(1)}, "'more' is not an input of this model"),
    ({**pixels(3), "weights": np.zeros((4, 10), np.float32)}, r"weights is float32\[4, 10\]"),
    ({**pixels(3), "pixels": np.zeros((3, 48), np.float32)}, r"pixels is float32\[3, 48\]"),
    ({**pixels(3), "pixels": np.zeros((3, 49))}, r"pixels is float64"),
    ({**pixels(3), "pixels": np.zeros((3, 49, 1), np.float32)}, r"pixels is float32\[3, 49, 1\]"),
    (pixels(41), "images from 1 to 40"),
    (pixels(0), "images from 1 to 40"),
]


@pytest.mark.parametrize("inputs, says", WRONG_INPUTS, ids=[says for _, says in WRONG_INPUTS])
def test_wrong_inputs_say_what_was_expected(inputs: Arrays, says: str, tmp_path: Path) -> None:
    loaded = network(Digits(), tmp_path / "mlp", profile=IMAGES).stateless_executor()
    with pytest.raises(RequestError) as error:
        loaded.run(inputs)
    assert says.replace("\\", "") in str(error.value)
    assert np.isfinite(loaded.run(pixels(2))["scores"]).all()
    loaded.close()


def test_every_dimension_has_bounds(tmp_path: Path) -> None:
    for profile, says in (
        ({}, "'images' has no bounds"),
        ({**IMAGES, "pages": Bounds(1, 1, 1)}, "'pages' is not a dimension of this model"),
        ({"images": Bounds(0, 1, 2)}, "1 <= low"), ({"images": Bounds(1, 9, 8)}, "usual <= high"),
        ({"images": Bounds(1, 1, 2**30)}, "high <="),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            network(Digits(), tmp_path / "never", profile=profile)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("profile", [{}, {"pages": Bounds(1, 1, 1)}, {**IMAGES, "pages": Bounds(1, 1, 1)}])
def test_missing_bounds_say_what_to_write(profile: dict[str, Bounds], tmp_path: Path) -> None:
    """The dimension, the inputs that have it, and a call that fixes it: the call is tried."""
    with pytest.raises(ConfigError) as error:
        network(Digits(), tmp_path / "never", profile=profile)
    said = str(error.value)
    assert "pixels [images, 49], weights [images, 10]" in error.value.expected
    assert (
        ("'pages'" in said)
        if "images" in profile
        else ("'images' has no bounds; it is of the input pixels, weights" in said)
    )
    call = error.value.fix.partition(": ")[2]
    source = Source.from_module(Digits(), parameters(Digits()))
    assert plan_engine(source, eval(call)).program.symbols


def test_bounds_that_follow_from_the_options_need_not_be_given(tmp_path: Path) -> None:
    class WithPages(Module):
        signature = Signature({"x": ("pages", 16), "lengths": ("S",)}, ("y",), {"lengths": DType.I32})

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return ops.mean_rows(x, lengths)

    with pytest.raises(ConfigError, match="has no bounds; it is of the input x") as error:
        plan_engine(Source.from_module(WithPages(), {}), BuildOptions())
    assert '"S"' not in error.value.fix and '"pages": Bounds(' in error.value.fix


def test_a_dimension_of_no_input_says_where_to_name_it() -> None:
    class Made(Module):
        signature = Signature({"x": ("rows", 16)}, ("y",))

        def forward(self, x: Tensor) -> Tensor:
            index = Tensor(x.trace, Value((Symbol("other"),), DType.I32, Constant(lambda: np.zeros(3), ("index",))))
            return ops.gather_rows(x, index)

    with pytest.raises(GraphError, match=r"gather_rows.*a dimension other that no input has") as error:
        plan_engine(Source.from_module(Made(), {}), BuildOptions())
    assert "x [rows, 16]" in error.value.expected and '("other", ' in error.value.fix


def test_an_engine_says_what_it_is_for(tmp_path: Path) -> None:
    engine = network(Digits(), tmp_path / "mlp", profile=IMAGES)
    for work in (lambda: engine.executor(n_pages=1), lambda: plan_run(engine, memory())):
        with pytest.raises(EngineError, match="no language model's engine: it gives scores, hidden"):
            work()
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "llama", seed=1)
    with pytest.raises(EngineError, match="the engine of a language model"):
        build(checkpoint, tmp_path / "llama", "bf16").stateless_executor()


@pytest.mark.parametrize("offset", [2, -4, 2**40, 10**7])
@pytest.mark.parametrize("name", ["pixels", "scores"])
def test_places_are_inside_the_activations(name: str, offset: int, tmp_path: Path) -> None:
    good = network(Digits(), tmp_path / "mlp", profile=IMAGES)._program()
    inputs, outputs = (
        tuple(replace(s, offset=offset) if s.name == name else s for s in slots)
        for slots in (good.inputs, good.outputs)
    )
    with pytest.raises(EngineError, match="inside them"):
        StatelessExecutor(replace(good, inputs=inputs, outputs=outputs))


class Fixed(Module):
    signature = Signature({"x": (3, 4)}, ("y",))

    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Same(Module):
    signature = Signature({"x": ("n", 4)}, ("x2",))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    loaded = network(Same(), tmp_path / "same", profile={"n": Bounds(1, 1, 5)}).stateless_executor()
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert (loaded.run({"x": x})["x2"] == x).all()
    loaded.close()


def test_a_network_without_symbols(tmp_path: Path) -> None:
    loaded = network(Fixed(), tmp_path / "fixed").stateless_executor()
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert (loaded.run({"x": x})["y"] == 2 * x).all()
    loaded.close()


# ------------------------------------------------------------------ an encoder


def vectors(loaded: StatelessExecutor, found: list[NDArray[np.int32]]) -> NDArray[np.float32]:
    return loaded.run(packed(found))["embeddings"].astype(np.float32)


def by_transformers(found: list[NDArray[np.int32]]) -> NDArray[np.float32]:
    """Each text alone through BertModel, its mean, made a vector of length 1."""
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=SMALL.vocab_size, hidden_size=SMALL.hidden_size, intermediate_size=SMALL.intermediate_size,
        num_hidden_layers=SMALL.n_layers, num_attention_heads=SMALL.n_heads,
        max_position_embeddings=SMALL.max_positions, type_vocab_size=SMALL.n_types, hidden_act="gelu",
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    weights = {name: torch.from_numpy(a) for name, a in parameters(BertSentences(SMALL)).items()}
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"embeddings.position_ids"}
    with torch.no_grad():
        means = [model(torch.from_numpy(t.astype(np.int64))[None]).last_hidden_state[0].mean(0) for t in found]
    vectors: NDArray[np.float32] = torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()
    return vectors


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 0.01), ("w8a8", 0.03)])
def test_an_encoder_is_bert(precision: str, tolerance: float, tmp_path: Path) -> None:
    """Sequences of any lengths in one run, each with the bits that it has alone."""
    engine, found = encoder(tmp_path / "bert", precision), texts()
    exact = by_transformers(found)
    for isa in usable_isas():
        loaded = engine.stateless_executor(isa=isa)
        together = vectors(loaded, found)
        assert together.shape == exact.shape and np.abs(together - exact).max() <= tolerance
        assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
        alone = [vectors(loaded, [t])[0] for t in found]
        shuffled = vectors(loaded, found[::-1])[::-1]
        assert (np.stack(alone) == together).all() and (shuffled == together).all()
        loaded.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8"])
def test_an_encoder_is_its_reference(precision: str, tmp_path: Path) -> None:
    inputs = packed(texts((5, 70, 1)))
    exact, plain = (reference(BertSentences(SMALL), inputs, p)["embeddings"] for p in ("fp32", precision))
    tolerance = max(np.abs(plain - exact).max(), 1e-6)
    for fuse in (True, False):
        loaded = encoder(tmp_path / f"bert{fuse}", precision, fuse=fuse).stateless_executor()
        got = loaded.run(inputs)["embeddings"]
        assert np.abs(got - plain).max() <= tolerance
        loaded.close()


def test_a_neighbour_that_is_not_finite_stays_alone(tmp_path: Path) -> None:
    """A token that the vocabulary does not have makes its own sequence NaN, and no other."""
    loaded, found = encoder(tmp_path / "bert", "fp32").stateless_executor(), texts()
    good = loaded.run(packed(found))["embeddings"]
    found[3][7] = SMALL.vocab_size
    bad = loaded.run(packed(found))["embeddings"]
    others = [i for i in range(len(found)) if i != 3]
    assert np.isnan(bad[3]).all() and (bad[others] == good[others]).all()
    loaded.close()


@pytest.mark.parametrize("lengths", [[3, 3], [6, 0], [-1, 6], [2**31 - 1, 1], [2, 2], [5, 1]])
def test_lengths_must_fit_the_tokens(lengths: list[int], tmp_path: Path) -> None:
    loaded = encoder(tmp_path / "bert", "fp32").stateless_executor()
    inputs = {**packed(texts((2, 3))), "lengths": np.array(lengths, np.int32)}
    with pytest.raises(ExecutionError, match="length"):
        loaded.run(inputs)
    assert np.isfinite(loaded.run(packed(texts((2, 3))))["embeddings"]).all()
    loaded.close()
