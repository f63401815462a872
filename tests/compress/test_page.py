"""compression.html: what its record says, in words; hostile names, old records; and why a layer lost what it lost."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.compress.calibration.statistics import InputStatistics
from millrace.compress.checkpoint.compression_record import RECORD, Record, add_to_record, read_record, write_record
from millrace.compress.measure.layer_diagnostics import LayerDiagnostics, heavy, peak, reasons, usual
from millrace.compress.methods.quantization_grid import Grid, fitted, nearest
from millrace.compress.report.page import PAGE, page_of, write_page
from millrace.errors import ConfigError, MachineError


class Read(HTMLParser):
    """Cells of each table by its id; all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._rows: list[list[str]] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "link", "iframe"), tag
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs), attrs
        if tag == "table":
            self._rows = self.tables.setdefault(dict(attrs).get("id") or "", [])
        elif tag == "tr":
            self._rows.append([])
        self._in_cell = tag in ("td", "th") or (self._in_cell and tag not in ("tr", "table"))
        if tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self._rows[-1][-1] += data


LAYERS = {f"model.layers.{i}.mlp.{kind}_proj": 0.01 for i in range(4) for kind in ("up", "down")}
WORST = "model.layers.2.mlp.down_proj"
WHOLE: dict[str, Any] = {
    "format": 1, "millrace": "1.0", "source": "mill.gguf", "model": "abc", "command": "millrace compress mill.gguf",
    "recipe": {"name": "int4-gptq-clip", "version": 1, "bits": 4, "layers": [{"match": "*"}] * 9},
    "bits_per_weight": 4.25, "bytes_before": 200 << 20, "bytes_after": 50 << 20, "notes": ["a note"],
    "errors": {**LAYERS, WORST: 0.1234}, "seconds": 12.34,
    "forms": {name: {"method": "gptq", "bits": 8 if "up" in name else 4, "group": 64 * ("down" in name),
                     "search": "clip", "smooth": "awq", "minimums": False} for name in LAYERS},
    "figures": {name: {"error": 0.01, "nearest": 0.02, "peak": 2.5, "heavy": 0.1} for name in LAYERS}
               | {WORST: {"error": 0.1234, "nearest": 0.4936, "peak": 2.6, "heavy": 0.83, "moved": 12.5}},
    "statistics": {"text": "feed", "tokens": 65536, "precision": "fp32"},
    "loss": {"kl": 0.168, "kl_error": 0.004, "perplexity": 22.0, "perplexity_error": 0.5, "source_perplexity": 20.0,
             "agreement": 0.776, "agreement_error": 0.01, "tokens": 1149, "precision": "w4a16",
             "text": "own", "digest": "0123456789abcdef"},
    "commands": {"loss": "millrace compress mill.gguf", "speed": "millrace compress mill.gguf --measure-speed"},
    "speed": {"machine": "a CPU", "threads": 2, "isa": "avx512", "source_precision": "bf16", "made_precision": "w4a16",
              "paces": [{"work": "decode, alone", "source": {"median": 40.0, "low": 30.0, "high": 50.0},
                         "made": {"median": 100.0, "low": 90.0, "high": 110.0}}]},
    "mmlu": {"task": "mmlu, lm-eval, 5 shots", "questions": 200, "source_precision": "bf16", "made_precision": "w4a16",
             "source_right": 60, "made_right": 56, "source_interval": [0.24, 0.367], "made_interval": [0.22, 0.346],
             "became_right": 5, "became_wrong": 9, "chose_otherwise": 20, "difference": -0.02,
             "interval": [-0.05, 0.01], "p_value": 0.42},
}  # fmt: skip


def shown(folder: Path, content: dict[str, Any]) -> Read:
    (folder / RECORD).write_text(json.dumps(content))
    write_page(folder)
    return Read((folder / PAGE).read_text())


def test_all_that_was_found_is_on_the_page(tmp_path: Path) -> None:
    page = shown(tmp_path, WHOLE)
    first = page.tables["worst"][1]
    assert first[:2] == [WORST, "12.34%"] and "carry 83% of their energy (usual here: 10%)" in first[2]
    assert first[3:] == [
        "GPTQ, scales moved by AWQ, ranges clipped, 4 bits in groups of 64",
        "12.34% rather than 49.36% to nearest; factors within 12.5 times of each other",
    ]
    assert "nothing of it stands out" in page.tables["worst"][2][2]
    kinds = {row[0]: row[1:] for row in page.tables["kinds"][1:]}
    assert kinds["up_proj"][:3] == ["4", "1.00%", "2.00%"] and "8 bits by row" in kinds["up_proj"][5]
    assert page.tables["speed"][1] == ["decode, alone", "40 (30-50)", "100 (90-110)", "2.50"]
    assert len(page.tables["layers"]) == 1 + len(LAYERS)
    assert "speed measured by" in page.text and "loss measured by" not in page.text
    for said in (
        "on 1,149 tokens of a text of its own (0123456789ab)", "mill.gguf --measure-speed", "0.168 ± 0.004",
         "22.000 ± 0.50", "+10.00%", "77.6%", "1,149", "millrace compress mill.gguf", "a note",
        "200.0 MiB", "50.0 MiB", "9, in compression.json", "12.3", "65536", "30.0% (24.0% to 36.7%)",
        "5 became right, 9 wrong", "loses 50% of what rounding to nearest", "4 of 8 layers have more bits than most",
    ):  # fmt: skip
        assert said in page.text, said


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    """A record of a run that was ended, and one of an earlier version: nothing is made up."""
    old = {key: WHOLE[key] for key in ("format", "source", "recipe", "bits_per_weight", "bytes_before", "bytes_after")}
    page = shown(tmp_path, {**old, "errors": LAYERS, "later": [1, {}]})
    assert "not measured: the run was ended" in page.text and "--measure-speed was not given" in page.text
    assert page.tables["worst"][1][1:] == ["1.00%", "", "", ""] and "speed" not in page.tables
    before = {key: value for key, value in WHOLE["loss"].items() if key not in ("text", "digest")}
    assert "of a text that was not recorded" in shown(tmp_path, {**old, "loss": before}).text
    page = shown(tmp_path, {**old, "loss": {"not_measured": "no tokenizer"}})
    assert "not measured: no tokenizer" in page.text


def test_what_a_folder_says_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    page = shown(tmp_path, {**WHOLE, "source": evil, "command": evil, "notes": [evil], "errors": {evil: 0.5}})
    assert page.text.count("alert(1)") >= 4 and page.tables["worst"][1][0] == evil


def test_a_record_is_added_to_whole(tmp_path: Path) -> None:
    write_record(tmp_path, {key: value for key, value in WHOLE.items() if key != "loss"} | {"later": 7})
    add_to_record(tmp_path, {"loss": WHOLE["loss"]})
    assert json.loads((tmp_path / RECORD).read_text()) == {**WHOLE, "later": 7}
    for content, said in (
        ("{", "damaged"),
        ('{"format": 1}', "damaged"),
        (json.dumps({**WHOLE, "format": 2}), "format 2"),
    ):
        (tmp_path / RECORD).write_text(content)
        with pytest.raises(ConfigError, match=said):
            add_to_record(tmp_path, {"loss": {}})
        assert (tmp_path / RECORD).read_text() == content, "nothing is lost"
    with pytest.raises(ConfigError, match="cannot read"):
        read_record(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_figure_that_is_no_number_leaves_the_record(tmp_path: Path, value: float) -> None:
    write_record(tmp_path, WHOLE)
    before = (tmp_path / RECORD).read_bytes()
    with pytest.raises(MachineError, match="not finite"):
        add_to_record(tmp_path, {"loss": {**WHOLE["loss"], "perplexity": value}})
    assert (tmp_path / RECORD).read_bytes() == before and read_record(tmp_path).measured is not None


@pytest.mark.parametrize("group", [0, 32, 64])
def test_a_peak_foretells_what_rounding_loses(group: int) -> None:
    """By its docstring: peak^2 / 675 of the energy, for weights whose errors are spread over a step."""
    rng = np.random.default_rng(group)
    w = rng.standard_normal((50, 192)).astype(np.float32)
    whole = w.reshape(50, -1, group or 192).astype(np.float64)
    exact = np.sqrt(np.square(np.abs(whole).max(axis=2)).mean() / np.square(whole).mean())
    assert peak(w, group) == pytest.approx(exact, rel=1e-6)
    grid = Grid(4, group)
    off = np.square(nearest(w, fitted(w, grid), grid) - w).sum() / np.square(w).sum()
    assert off == pytest.approx(peak(w, group) ** 2 / 675, rel=0.1)
    assert peak(np.zeros((2, 32), np.float32), group) == 0


def test_reasons_are_what_was_put_there() -> None:
    """Heavy inputs and large weights, each made on purpose; a layer like the others has none."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((500, 128)), rng.standard_normal((40, 128)).astype(np.float32)

    def figures(x: Any, w: Any) -> LayerDiagnostics:
        found = InputStatistics(("a",), (x.T @ x / len(x)).astype(np.float32), *np.zeros((2, 128), np.float32))
        return LayerDiagnostics(error=0.01, peak=peak(w, 64), heavy=heavy(found))

    loud, tall = x.copy(), w.copy()
    loud[:, 5] *= 30
    tall[:, 7] *= 6
    layers = {
        "plain": figures(x, w), "other": figures(x[::-1], w[::-1]), "third": figures(x * 3, w * 2),
        "loud": figures(loud, w), "tall": figures(x, tall),
    }  # fmt: skip
    of_all = usual(layers)
    said = {name: reasons(one, of_all) for name, one in layers.items()}
    assert said["plain"] == said["other"] == said["third"] == []
    assert len(said["loud"]) == 1 and "1 % of its inputs carry" in said["loud"][0]
    energy = np.square(loud).mean(axis=0)
    assert layers["loud"].heavy == pytest.approx(np.sort(energy)[-2:].sum() / energy.sum(), rel=1e-5)
    assert len(said["tall"]) == 1 and "root mean square" in said["tall"][0]


def test_a_page_of_any_record_is_bounded(tmp_path: Path) -> None:
    names = {f"layers.{i}.x" * 50: 0.1 for i in range(5000)}
    record = Record(format=1, source="s", recipe={}, bits_per_weight=4, bytes_before=1, bytes_after=1, errors=names)
    assert len(page_of(record)) < 3 << 20
