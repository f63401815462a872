"""Whole layers by methods: what becomes of their tensors, and the orderings of published tables on a trained model."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.quantised import QuantisedMatrix
from millrace.compile.build import BuildOptions, plan_pieces
from millrace.compile.find import BUNDLED
from millrace.compile.precision import PrecisionMap
from millrace.compile.program import Bounds
from millrace.compile.source import Source
from millrace.compress.collect import collect, samples
from millrace.compress.gptq import Gptq, gptq
from millrace.compress.grid import IMATRIX_MSE, WHOLE_ROW, Grid, rounded
from millrace.compress.layers import Layer, Method, rounded_layers, rounding, sensitivity
from millrace.compress.loss import relative_error
from millrace.compress.smooth import LLM_COMPRESSOR_EXAMPLE, WEIGHT, Awq
from millrace.compress.statistics import Statistics
from millrace.errors import ConfigError
from millrace.evaluate.pieces import answers, read, score
from millrace.evaluate.windows import Windows
from millrace.kernels.precision import Precision
from millrace.model.module import Weights

G32 = Grid(4, 32)
METHODS = {
    "rtn": Method(grid=G32), "gptq": Method(grid=G32, gptq=Gptq(), search=IMATRIX_MSE),
    "awq": Method(grid=G32, smooth=Awq((0.3, 0.5)), clip=True), "rtn row": Method(grid=Grid(4, WHOLE_ROW)),
    "rtn 8": Method(grid=Grid(8, 32)), "smooth 8": Method(grid=Grid(8, WHOLE_ROW), smooth=LLM_COMPRESSOR_EXAMPLE),
}  # fmt: skip


class Trained(NamedTuple):
    checkpoint: Checkpoint
    source: Source
    statistics: Statistics
    held_out: Windows

    def layers(self, method: Method, most: int | None = None) -> list[Layer]:
        weights, head_dim = self.source.weights, self.checkpoint.decoder.head_dim
        return list(
            islice(rounded_layers(weights.load, weights.shapes, self.statistics, lambda _: method, head_dim), most)
        )

    def changed(self, layers: list[Layer]) -> Source:
        """With what the codes stand for, in float32."""
        arrays = {name: array for layer in layers for name, array in layer.floats.items()}
        for layer in layers:
            arrays |= {n + WEIGHT: r.matrix.dequantise().astype(np.float32) for n, r in layer.matrices.items()}
        load = self.source.weights.load
        weights = Weights(self.source.weights.shapes, lambda n: arrays[n] if n in arrays else load(n))
        return replace(self.source, weights=weights)

    def kl(self, sources: dict[str, Source]) -> dict[str, float]:
        step = BuildOptions(
            precision=PrecisionMap(Precision.FP32), max_batch=1, max_step_tokens=64, profile={"R": Bounds(1, 64, 64)}
        )
        vocab, found = self.source.vocab_size, {}
        exact = read(list(plan_pieces(self.source, step)), self.held_out, vocab, lambda: None)
        for name, source in sources.items():
            other = read(list(plan_pieces(source, step)), self.held_out, vocab, lambda: None)
            with answers(exact, vocab) as a, answers(other, vocab) as b:
                found[name] = score(a, b, self.held_out).mean_kl
        return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Calibrated on the first part of a text, judged on another."""
    checkpoint, text = Checkpoint.open(BUNDLED / "tiny"), (BUNDLED / "calibration.txt").read_text()
    source, cut = Source.from_checkpoint(checkpoint), 2 * len(text) // 3
    windows = samples(checkpoint.tokenizer, text[:cut], 40, 64)
    held_out = samples(checkpoint.tokenizer, text[cut:], 12, 64)
    yield Trained(checkpoint, source, collect(source, windows, tmp_path_factory.mktemp("s") / "s"), held_out)


def test_what_becomes_of_a_layers_tensors(tiny: Trained) -> None:
    shapes = tiny.source.weights.shapes
    layers = tiny.layers(METHODS["awq"], 2)
    assert [layer.name for layer in layers] == ["model.layers.0", "model.layers.1"]
    for layer in layers:
        assert {f"{n}{WEIGHT}" for n in layer.matrices} == {
            n for n in shapes if n.startswith(f"{layer.name}.") and n.endswith("_proj.weight")
        }
        for name, found in layer.matrices.items():
            assert found.matrix.codes.shape == shapes[name + WEIGHT] and 0 < found.error < 0.2
        norms = {f"{f.site.source}{WEIGHT}" for f in layer.folds if f.site.is_norm}
        assert set(layer.floats) == norms, "what is no matrix and changed: norms that took up scales"
    assert sum(len(layer.folds) for layer in layers) >= 4
    assert not any(layer.folds or layer.floats for layer in tiny.layers(METHODS["gptq"], 1))


def test_the_orderings_of_published_tables_hold(tiny: Trained) -> None:
    """Calibrated 4 bits < rounded to nearest, groups < rows, 8 bits < 4; moved scales alone cost nothing."""
    layers = {name: tiny.layers(method) for name, method in METHODS.items()}
    kl = tiny.kl({name: tiny.changed(found) for name, found in layers.items()})
    assert max(kl["gptq"], kl["awq"]) < 0.9 * kl["rtn"] < 0.9 * kl["rtn row"], kl
    assert max(kl["rtn 8"], kl["smooth 8"]) < 0.2 * min(kl["gptq"], kl["awq"]), kl


def test_a_method_is_its_parts(tiny: Trained) -> None:
    """Of one matrix: the same codes as from the parts that other tests hold; its error is that of its codes."""
    name = "model.layers.1.mlp.down_proj"
    w, x = np.asarray(tiny.source.weights.load(name + WEIGHT), np.float32), tiny.statistics[name]
    energy = x.gram.diagonal()
    parts: list[tuple[Method, QuantisedMatrix]] = [
        (Method(grid=G32), rounded(w, G32)),
        (Method(grid=G32, search=IMATRIX_MSE), rounded(w, G32, IMATRIX_MSE, energy)),
        (METHODS["gptq"], gptq(w, x.gram, G32, Gptq(), IMATRIX_MSE).matrix),
        (Method(grid=G32, gptq=Gptq(order=False)), gptq(w, x.gram, G32, Gptq(order=False)).matrix),
    ]  # fmt: skip
    for method, exact in parts:
        found = rounding(w, x, method)
        assert (found.matrix.codes == exact.codes).all() and (found.matrix.scales == exact.scales).all()
        assert found.error == pytest.approx(relative_error(w, exact.dequantise(), x.gram))
    errors = sensitivity(w, x, [METHODS["rtn row"], METHODS["rtn"], METHODS["gptq"], METHODS["rtn 8"]])
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01 * errors[1]


def test_a_range_is_chosen_in_one_way() -> None:
    with pytest.raises(ConfigError, match="both searched and clipped"):
        Method(grid=G32, search=IMATRIX_MSE, clip=True)
