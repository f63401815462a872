"""Every way to a smaller folder says why each layer lost what it lost, and beside what; errors are what they say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compress.calibration.calibrated_methods import by_statistics, statistics_of
from millrace.compress.calibration.calibration_pass import samples
from millrace.compress.calibration.statistics import CalibrationStatistics
from millrace.compress.checkpoint.compression_record import read_record
from millrace.compress.compress import CompressionMethod, by_rounding, compress
from millrace.compress.compression_plan import CompressionPlan, plan_compression
from millrace.compress.recipe import PRESETS, Recipe, parsed
from millrace.compress.report.page import PAGE
from millrace.compress.search.candidates import RoundedMatrixStore, recipe_of, survey
from tests.compress.conftest import TEXT
from tests.compress.test_page import Read
from tests.fuzz.originals import write_checkpoint

Small = tuple[Checkpoint, CalibrationStatistics]
PLAIN = {"int8-wo", "int4-wo", "fp8", "fp8-tensor"}  # to nearest: nothing was rescued
OTHERS: dict[str, dict[str, Any]] = {
    "wanda": {"method": "wanda"}, "sparsegpt": {"method": "sparsegpt"},
    "pruned": {"method": "none", "prune": {"mlp": 0.4, "heads": 0.5}},
}  # fmt: skip


def recipe(name: str) -> Recipe:
    return PRESETS[name] if name in PRESETS else parsed({"version": 1, **OTHERS[name]}, name)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    checkpoint = Checkpoint.open(write_checkpoint(folder / "c", width=64, inner=96))
    text = samples(checkpoint.tokenizer, TEXT, 2, 64)
    return checkpoint, statistics_of(checkpoint, text, folder / "s", lambda *_: None)


def check(small: Small, plan: CompressionPlan, way: CompressionMethod, out: Path) -> Any:
    """Every layer that was changed has reasons, and errors equal a plain float64 sum; returns the page."""
    checkpoint, statistics = small
    errors = compress(plan, out, way).errors
    record, made = read_record(out), Checkpoint.open(out).tensors
    assert errors and set(record.figures) == set(errors) >= set(plan.layers)
    moved = {name for name, one in record.figures.items() if one.moved is not None}
    for name, one in record.figures.items():
        weight = f"{name}.weight"
        if moved or made[weight].shape != checkpoint.tensors[weight].shape:
            continue  # what moved scales and pruning lose has its own tests
        w, got = (t.load(weight).astype(np.float64) for t in (checkpoint.tensors, made))
        gram = statistics[name].gram.astype(np.float64) if one.of == "output" else np.eye(w.shape[1])
        share = np.trace((got - w) @ gram @ (got - w).T) / np.trace(w @ gram @ w.T)
        assert one.error == pytest.approx(share, rel=1e-3, abs=1e-9), (name, one)
    page = Read((out / PAGE).read_text())
    assert all(row[2] for row in page.tables["worst"][1:]), "why"
    return page


@pytest.mark.parametrize("name", [*PRESETS, *OTHERS])
def test_every_way_has_its_reasons(small: Small, tmp_path: Path, name: str) -> None:
    plan = plan_compression(small[0], recipe(name))
    page = check(small, plan, by_statistics(small[1]) if plan.calibrated else by_rounding, tmp_path / "out")
    of = "its output's energy" if plan.calibrated else "its weights' energy"
    assert f"Of {of}, the share" in page.text
    assert all((" rather than " in row[4]) == (name not in PLAIN) for row in page.tables["worst"][1:])
    assert ("The median layer loses" in page.text) == (name not in PLAIN)
    if name in OTHERS:
        assert "to nearest" not in "".join(row[4] for row in page.tables["worst"][1:])


def test_a_mix_from_the_shelf_has_them_too(small: Small, tmp_path: Path) -> None:
    checkpoint, statistics = small
    plan, shelf = plan_compression(checkpoint, PRESETS["int8-wo"]), RoundedMatrixStore(tmp_path / "shelf")
    survey(plan, statistics, shelf, lambda *_: None)
    formats = ["fp8", "int8", "int4-g32", "int8-a8"]
    chosen = {layer: formats[i % 4] for i, layer in enumerate(plan.layers)}
    page = check(small, plan_compression(checkpoint, recipe_of(chosen)), shelf.method(chosen), tmp_path / "out")
    assert all(" rather than " in row[4] for row in page.tables["worst"][1:])


def test_where_units_differ_it_is_said(small: Small, tmp_path: Path) -> None:
    """A head has no statistics; plain FP8 beside GPTQ has, and is measured by them."""
    layers = [{"match": "*.v_proj", "method": "fp8"}, {"match": "lm_head", "method": "rtn", "search": "none"}]
    plan = plan_compression(small[0], parsed({"version": 1, "method": "gptq", "group": 32, "layers": layers}, "mine"))
    page = check(small, plan, by_statistics(small[1]), tmp_path / "out")
    lost = {row[0].rpartition(".")[2]: row[1] for row in page.tables["layers"][1:]}
    assert lost["lm_head"].endswith(" of its weights' energy") and lost["v_proj"].endswith("%")
