"""Whole layers by methods: what becomes of their tensors, and the orderings of published tables on a trained model."""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from millrace.checkpoint.weights.quantized_matrix import QuantisedMatrix
from millrace.compile.build import BuildOptions
from millrace.compile.precision import PrecisionMap
from millrace.compress.calibration import layerwise_rounding as layers_room
from millrace.compress.calibration.layerwise_rounding import Method, RoundedLayer, rounded_layers, rounding
from millrace.compress.measure import reconstruction_error
from millrace.compress.measure.accuracy import pieces_of
from millrace.compress.measure.reconstruction_error import relative_error
from millrace.compress.methods import awq_smoothquant
from millrace.compress.methods.awq_smoothquant import WEIGHT, Awq, SmoothQuant
from millrace.compress.methods.gptq import Gptq, gptq
from millrace.compress.methods.quantization_grid import IMATRIX_MSE, WHOLE_ROW, Floats, Grid, rounded
from millrace.errors import ConfigError
from millrace.kernels.precision import Precision
from millrace.model.module import Weights
from tests.compress.conftest import Trained

G32 = Grid(4, 32)
METHODS = {
    "rtn": Method(grid=G32), "gptq": Method(grid=G32, gptq=Gptq(), search=IMATRIX_MSE),
    "awq": Method(grid=G32, smooth=Awq((0.3, 0.5))), "clipped": Method(grid=G32, smooth=Awq((0.3, 0.5)), clip=True),
    "rtn row": Method(grid=Grid(4, WHOLE_ROW)),
    "rtn 8": Method(grid=Grid(8, 32)), "smooth 8": Method(grid=Grid(8, WHOLE_ROW), smooth=SmoothQuant(0.8)),
}  # fmt: skip


class Named(NamedTuple):
    """What is made of each layer by each method."""

    model: Trained
    layers: dict[str, list[RoundedLayer]]

    def kl(self) -> dict[str, float]:
        """Of each, with what the codes stand for, in float32; planned once, for sizes are the same."""
        source, found, arrays = self.model.source, dict[str, float](), dict[str, Floats]()
        load = source.weights.load
        weights = Weights(source.weights.shapes, lambda name: arrays[name] if name in arrays else load(name))
        options = BuildOptions(precision=PrecisionMap(Precision.FP32))
        pieces = pieces_of(replace(source, weights=weights), self.model.reference.text, options)
        for method, layers in self.layers.items():
            arrays.clear()
            for layer in layers:
                arrays |= layer.floats
                arrays |= {n + WEIGHT: r.matrix.dequantise().astype(np.float32) for n, r in layer.matrices.items()}
            found[method] = self.model.reference.score(pieces).mean_kl
        return found


@pytest.fixture(scope="module")
def named(trained: Trained) -> Named:
    weights, head_dim = trained.source.weights, trained.checkpoint.decoder.head_dim

    def made(method: Method) -> list[RoundedLayer]:
        return list(rounded_layers(weights.load, weights.shapes, trained.statistics, lambda _: method, head_dim))

    return Named(trained, {name: made(method) for name, method in METHODS.items()})


def test_what_becomes_of_a_layers_tensors(named: Named) -> None:
    shapes, layers = named.model.source.weights.shapes, named.layers["awq"]
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
    assert not any(layer.folds or layer.floats for layer in named.layers["gptq"])


def test_scales_move_where_they_help_within_the_ranges_that_are_taken(named: Named) -> None:
    """In groups of 32, clipped, these layers do better as they are: what was found with whole ranges is not taken."""
    n_not_taken = 0
    for scaled, clipped in zip(named.layers["awq"], named.layers["clipped"], strict=True):
        for fold in scaled.folds:
            if any(fold.site == one.site for one in clipped.folds):
                continue
            n_not_taken += 1
            for name in fold.site.linears:
                w, x = named.model.source.weights.load(name + WEIGHT), named.model.statistics[name]
                plain = rounding(np.asarray(w, np.float32), x, Method(grid=G32, clip=True))
                made = clipped.matrices[name]
                assert (made.matrix.codes == plain.matrix.codes).all() and made.error == pytest.approx(plain.error)
    assert n_not_taken > 2


def test_what_a_choice_has_rounded_is_not_rounded_again(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of a matrix are clipped as it is and as it is scaled, where scales were found, and once more only where
    rows change afterwards; and the roundings that were handed on are those of the folded tensors from the beginning."""
    weights, n_clipped = trained.source.weights, Counter[tuple[int, ...]]()

    def counted(w: np.ndarray, *more: Any, **named: Any) -> Any:
        n_clipped[w.shape] += 1
        return reconstruction_error.clipped(w, *more, **named)

    monkeypatch.setattr(layers_room, "clipped", counted)
    method, head_dim = (
        Method(grid=Grid(4, WHOLE_ROW), smooth=Awq((0.3, 0.5)), clip=True),
        trained.checkpoint.decoder.head_dim,
    )
    made = list(rounded_layers(weights.load, weights.shapes, trained.statistics, lambda _: method, head_dim))
    n_matrices, sources = sum(len(layer.matrices) for layer in made), 0
    for layer in made:
        arrays = {n: np.asarray(weights.load(n), np.float32) for n in weights.shapes if n.startswith(f"{layer.name}.")}
        inputs = {n: trained.statistics[n] for n in layer.matrices}
        for one in layer.folds:
            awq_smoothquant.fold(arrays, one.site, one.factors)
            inputs |= dict.fromkeys(
                one.site.linears, awq_smoothquant.scaled_weights(inputs[one.site.linears[0]], one.factors)
            )
            sources += not one.site.is_norm
        for name, found in layer.matrices.items():
            exact = rounding(arrays[name + WEIGHT], inputs[name], Method(grid=Grid(4, WHOLE_ROW), clip=True))
            np.testing.assert_array_equal(found.matrix.codes, exact.matrix.codes, err_msg=name)
            assert found.error == pytest.approx(exact.error, rel=1e-6)
    assert any(layer.folds for layer in made)
    assert n_clipped.total() - n_matrices <= 2 * n_matrices + sources, "those above were counted, too"


def test_the_orderings_of_published_tables_hold(named: Named) -> None:
    """Calibrated 4 bits < rounded to nearest, groups < rows, 8 bits < 4; moved scales alone cost nothing."""
    kl = named.kl()
    assert max(kl["gptq"], kl["clipped"]) < 0.9 * kl["rtn"] < 0.9 * kl["rtn row"], kl
    assert max(kl["rtn 8"], kl["smooth 8"]) < 0.2 * min(kl["gptq"], kl["clipped"]), kl


def test_a_method_is_its_parts(trained: Trained) -> None:
    """Of one matrix: the same codes as from the parts that other tests hold; its error is that of its codes."""
    name = "model.layers.1.mlp.down_proj"
    w, x = np.asarray(trained.source.weights.load(name + WEIGHT), np.float32), trained.statistics[name]
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
    errors = [rounding(w, x, METHODS[name]).error for name in ("rtn row", "rtn", "gptq", "rtn 8")]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01 * errors[1]


def test_a_range_is_chosen_in_one_way() -> None:
    with pytest.raises(ConfigError, match="both searched and clipped"):
        Method(grid=G32, search=IMATRIX_MSE, clip=True)
