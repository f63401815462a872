"""`millrace inspect` and `tune` of whatever was built: a network of one's own, an encoder, a language model."""

import json
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from millrace.compile.builder import build_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.settings import BuildSettings
from millrace.compile.tune.tuner import Tuning, tune
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import NodeEntry
from millrace.engine.artifact.manifest import SlotEntry
from millrace.engine.artifact.tactics import read_tables
from millrace.graph.types import DType
from millrace.model import ops
from millrace.model.bert import BertSentences
from millrace.model.layers import Linear
from millrace.model.module import ENCODER, Module, Signature
from millrace.model.tensor import Tensor
from tests.cli.conftest import Millrace
from tests.compile.test_cnn import SmallNetwork
from tests.compile.test_cnn import engine_of as convolutional
from tests.support.checkpoints import random_encoder
from tests.support.networks import SMALL, Digits, network

PARTS = ("--calls", "--graph", "--memory", "--weights", "--tactics")
OF_TEXTS = re.compile(r"\b(KV|tokens?|contexts?|sequences?|vocabulary|decoding)\b", re.IGNORECASE)


class Squared(Module):
    """As docs/extending/activation.md has it."""

    signature = Signature({"x": ("B", 24)}, ("y",))

    def __init__(self) -> None:
        self.up, self.down = Linear(24, 96), Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        r = ops.relu(self.up(x))
        return self.down(r * r)


class Pair(Module):
    """Two symbols, and products of one shape for both."""

    signature = Signature({"a": ("A", 24), "b": ("B", 24)}, ("c", "d"))

    def __init__(self) -> None:
        self.one, self.two = Linear(24, 96), Linear(24, 96)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(a), self.two(b)


@pytest.fixture(scope="module")
def built(built_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("networks")
    build_engine("bert", random_encoder(folder / "m"), folder / "bert", BuildSettings(tune=0))
    network(Squared(), folder / "squared", profile={"B": Bounds(1, 8, 64)})
    return {"own": folder / "squared", "encoder": folder / "bert", "tiny": built_tiny}


def text_of(page: Path) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", page.read_text().partition("</style>")[2]))


@pytest.mark.parametrize("kind", ["own", "encoder", "tiny"])
def test_every_option_shows_something(millrace: Millrace, built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asked: list[list[str]] = [[], ["--html", str(page)], *([part] for part in PARTS)]
    for arguments in asked:
        for form in ([], ["--json"]):
            shown = millrace("inspect", built[kind], *arguments, *form)
            assert shown.code == 0, shown.err
            assert shown.out or arguments[:1] == ["--html"]
            if form:
                json.loads(shown.out)
            assert kind != "own" or not OF_TEXTS.search(shown.out), shown.out
    told = text_of(page)
    assert ("KV cache" in told) == ("A step of decoding reads" in told) == (kind == "tiny")
    assert ("A run reads" in told) == (kind != "tiny") and (kind != "own" or not OF_TEXTS.search(told))


def test_limits_go_by_the_symbols_of_the_network(millrace: Millrace, built: dict[str, Path], tmp_path: Path) -> None:
    millrace("inspect", built["own"], "--html", tmp_path / "page.html")
    said = json.loads(millrace("inspect", built["own"], "--json").out)
    assert "B from 1 to 64, usually 8" in millrace("inspect", built["own"]).out
    assert "B from 1 to 64, usually 8" in text_of(tmp_path / "page.html")
    assert said["symbols"] == {"B": {"low": 1, "usual": 8, "high": 64}}
    assert not {"max_context", "max_sequences", "max_step_tokens"} & said.keys()
    assert set(said["memory"]) == {"weights_bytes", "activation_bytes", "activation_lower_bound", "peak_bytes"}
    assert said["memory"]["peak_bytes"] == said["memory"]["weights_bytes"] + said["memory"]["activation_bytes"]
    tiny = json.loads(millrace("inspect", built["tiny"], "--json").out)
    assert tiny["max_step_tokens"] == tiny["symbols"]["T"]["high"] == 512
    assert tiny["max_sequences"] == tiny["symbols"]["S"]["high"] == 16 and list(tiny["symbols"]) == ["T", "S", "R"]


def test_a_convolutional_network(millrace: Millrace, tmp_path: Path) -> None:
    weights = {
        n: np.ones([d for d in p.shape if isinstance(d, int)], np.float32) for n, p in SmallNetwork().parameters()
    }
    convolutional(SmallNetwork(), weights, tmp_path / "e").close()
    for arguments in ([], ["--html", str(tmp_path / "page.html")], *([part] for part in PARTS)):
        shown = millrace("inspect", tmp_path / "e", *arguments)
        assert shown.code == 0 and not OF_TEXTS.search(shown.out), shown
    calls = millrace("inspect", tmp_path / "e", "--calls").out
    assert calls.count("convolution") >= 3 and calls.count("pooling") >= 2 and "channel_affine" in calls
    assert "stem" in calls and "images from 1 to 9, usually 4" in millrace("inspect", tmp_path / "e").out


def test_a_symbol_that_is_called_as_a_language_model_s_is_none(millrace: Millrace, tmp_path: Path) -> None:
    class Named(Digits):
        signature = Signature({"pixels": ("S", 49), "weights": ("S", 10)}, ("scores", "hidden"))

    network(Named(), tmp_path / "e", profile={"S": Bounds(1, 3, 7)})
    shown = millrace("inspect", tmp_path / "e").out
    assert "S from 1 to 7, usually 3" in shown and not OF_TEXTS.search(shown)


def test_tune_times_the_usual_size_of_each_symbol(millrace: Millrace, tmp_path: Path) -> None:
    """As many rows as its products have: those of A are timed with A's, those of B with B's."""
    network(Pair(), tmp_path / "e", profile={"A": Bounds(1, 2, 40), "B": Bounds(1, 24, 24)})
    told = millrace("tune", tmp_path / "e", "--seconds", "2")
    assert told.code == 0, told.err
    (table,) = read_tables(tmp_path / "e")
    rows = {region.name: [choice.rows for choice in region.choices] for region in table.regions}
    assert rows == {"matmul fp32 96 x 24": [2], "matmul fp32 96 x 24, B rows": [24]}
    assert all(choice.compared for region in table.regions for choice in region.choices)
    shown = millrace("inspect", tmp_path / "e", "--tactics").out
    assert "B rows" in shown and "sampled" not in shown
    engine = Engine.open(tmp_path / "e")
    opened = engine.stateless_executor()  # its tactics are taken
    opened.close()
    engine.close()


def test_tune_times_each_kind(millrace: Millrace, built: dict[str, Path], tmp_path: Path) -> None:
    for kind, rows in (("own", {8}), ("encoder", {16, 128, 512}), ("tiny", {1, 4, 16, 64, 128})):
        folder = Path(shutil.copytree(built[kind], tmp_path / kind))
        told = json.loads(millrace("tune", folder, "--seconds", "2", "--json").out)
        assert {c["rows"] for r in told["regions"] for c in r["choices"]} == rows
        late = re.findall(r"\d+", told["note"].partition(" rows were timed")[0])  # on a busy machine
        compared = {c["rows"] for r in told["regions"] for c in r["choices"] if c["compared"]}
        assert compared == rows - set(map(int, late)) and compared


class Scores(BertSentences):
    """It takes texts, and gives what no encoder gives."""

    signature = Signature(ENCODER.inputs, ("scores",), ENCODER.dtypes)


def test_rows_of_sequences_are_shared_out(millrace: Millrace, tmp_path: Path) -> None:
    usual = {"T": Bounds(1, 50, 64), "S": Bounds(1, 7, 8)}
    network(Scores(SMALL), tmp_path / "e", profile=usual)
    told = json.loads(millrace("tune", tmp_path / "e", "--seconds", "2", "--json").out)
    assert {c["rows"] for r in told["regions"] for c in r["choices"] if c["compared"]} == {50}
    assert "T from 1 to 64, usually 50; S from 1 to 8, usually 7" in millrace("inspect", tmp_path / "e").out


def test_a_network_that_refuses_made_up_inputs_is_not_timed(millrace: Millrace, tmp_path: Path) -> None:
    """More sequences than rows: no step is like that."""
    network(Scores(SMALL), tmp_path / "e", profile={"T": Bounds(1, 4, 64), "S": Bounds(1, 7, 8)})
    millrace("tune", tmp_path / "e").assert_mistake("cannot be timed", "made-up inputs")
    assert not read_tables(tmp_path / "e")


def test_inputs_that_no_memory_holds_are_not_made_up(tmp_path: Path) -> None:
    """Whatever a manifest says of an input that nothing reads."""
    engine = network(Squared(), tmp_path / "e", profile={"B": Bounds(1, 8, 64)})
    unread = SlotEntry("u", [2**31 - 1] * 4, DType.F32, None)
    cpu = structs.replace(engine.manifest.cpu, inputs=[*engine.manifest.cpu.inputs, unread])
    table = tune(replace(engine, manifest=structs.replace(engine.manifest, cpu=cpu)), Tuning(0.1))
    assert "not timed" in table.note and "inputs" in table.note and not table.compared()


def rows_of(shown: str) -> list[list[str]]:
    """Cells, which two spaces part; where one is empty, the next stands in its place."""
    return [re.split(r" {2,}", line.strip()) for line in shown.splitlines()]


def test_a_graph_can_be_read_alone(millrace: Millrace, built: dict[str, Path]) -> None:
    """Every value that is used was named before; outputs are marked; expressions are there."""
    assert rows_of(millrace("inspect", built["own"], "--graph").out) == [
        ["value", "op", "inputs", "shape", "what", "origin"],
        ["0", "input x", "B x 24", "f32"],
        ["1", "linear", "0 up.weight", "B x 96", "up"],
        ["2", "elementwise", "1", "B x 96", "max(x, 0)", "(the model)"],
        ["3", "elementwise", "2", "B x 96", "x^2", "(the model)"],
        ["4", "linear", "3 down.weight", "B x 24", "down"],
        ["output y", "4", "B x 24"],
    ]
    inputs = {
        "encoder": ["tokens", "types", "positions", "lengths"],
        "tiny": ["tokens", "positions", "lengths", "rows"],
    }
    for kind, names in inputs.items():
        rows = rows_of(millrace("inspect", built[kind], "--graph").out)[1:]
        assert [row[:2] for row in rows[: len(names)]] == [[str(i), f"input {name}"] for i, name in enumerate(names)]
        assert rows[-1][0] == {"encoder": "output embeddings", "tiny": "output logits"}[kind]
        known: set[str] = set()
        for row in rows[:-1]:
            assert known.issuperset(n for n in row[2].split() if n.isdigit()) or "input" in row[1]
            known.add(row[0])
        assert rows[-1][1] in known and len(known) == len(rows) - 1
        graph = json.loads(millrace("inspect", built[kind], "--graph", "--json").out)
        assert [p["name"] for p in graph["inputs"]] == names and graph["outputs"][0]["value"] == int(rows[-1][1])


def test_the_epilogue_says_what_it_computes(millrace: Millrace, built: dict[str, Path], tmp_path: Path) -> None:
    millrace("inspect", built["own"], "--html", tmp_path / "page.html")
    for shown in (millrace("inspect", built["own"]).out, millrace("inspect", built["own"], "--calls").out):
        assert "max(x, 0)^2 in the epilogue" in shown
    assert "max(x, 0)^2 in the epilogue" in text_of(tmp_path / "page.html")
    assert json.loads(millrace("inspect", built["own"], "--json").out)["fusions"] == 1
    calls = json.loads(millrace("inspect", built["own"], "--calls", "--json").out)
    assert [call["expression"] for call in calls] == ["max(x, 0)^2", ""]


@pytest.mark.parametrize("tree", [[], "mul", ["mul", 0], ["mul", 0, 1], ["boil", 0], [[0]], 7, [["mul"] * 40]])
def test_an_expression_that_is_none_is_no_crash(tree: object) -> None:
    deep: object = 0
    for _ in range(500):
        deep = ["neg", deep]
    for found in (tree, deep):
        assert NodeEntry("elementwise", [0], [1], [["B", 3]], [""], {"tree": found}).expression == "?"
    assert not NodeEntry("linear", [0], [1], [["B", 3]], [""], {"bias": True}).expression
