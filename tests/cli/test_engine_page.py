"""`millrace inspect --html`: one page that holds all of an engine, whatever it is called, and stays small."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec

from millrace.checkpoint.config.model_config import read_config
from millrace.cli.engine_tables import Tables
from millrace.cli.inspect.engine_page import KINDS, WIDTH, alive, engine_page
from millrace.compile.build import BuildOptions, plan_engine
from millrace.compile.builder import build_engine
from millrace.compile.lower_cpu.program_report import program_table
from millrace.compile.precision import precision_map
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import GraphTable, ProgramTable
from millrace.graph.graph_json import graph_table
from millrace.graph.types import Array
from millrace.machine.roofline import Roofline
from millrace.model.families import build_model
from millrace.model.module import Weights
from tests.cli.conftest import Millrace
from tests.support.checkpoints import random_encoder


class Page(HTMLParser):
    """Whether every element is closed where it should be, and what the page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> in {self.open}"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def blocks(self) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == "rect" and "block" in (attrs["class"] or "")]


def test_it_holds_every_layer_call_weight_and_buffer(built_tiny: Path, roofline: Roofline) -> None:
    tables = Tables(Engine.open(built_tiny))
    page = Page(engine_page(tables, roofline))
    text = " ".join(page.text)
    assert all(f"model.layers.{i}" in text for i in range(5)) and "lm_head" in text and all(k in text for k in KINDS)
    assert all(w.name[:80] in text for w in tables.program.weights)
    assert all(f"{i}" in page.text for i in range(len(tables.calls))) and "3 products merged" in text
    assert len(page.blocks()) == len(tables.program.buffers)
    assert "lower bound" in text and "tokens a second" in text and "run millrace doctor" not in text
    assert "run millrace doctor" in engine_page(tables, None)


def test_the_blocks_lie_within_the_drawing_and_nothing_alive_overlaps(built_tiny: Path) -> None:
    tables = Tables(Engine.open(built_tiny))
    for block in Page(engine_page(tables, None)).blocks():
        x, y, width, height = (float(block[key] or "") for key in ("x", "y", "width", "height"))
        assert 78 <= x <= x + width <= 1080 - 14 + 0.1 and 16 <= y <= y + height <= 430 - 34 + 0.1 and width > 0
    for i, a in enumerate(tables.program.buffers):
        for b in tables.program.buffers[:i]:
            low, high = sorted((a, b), key=lambda buffer: buffer.offset)
            together = a.first <= b.last and b.first <= a.last
            assert not together or low.offset + low.bytes <= high.offset, (a, b)


def test_buffers_live_as_long_as_calls_name_them(built_tiny: Path) -> None:
    program = Tables(Engine.open(built_tiny)).program
    for i, call in enumerate(program.calls):
        for operand in call.operands.values():
            if isinstance(number := operand.get("buffer"), int):
                assert program.buffers[number].first <= i <= program.buffers[number].last


def large(n_layers: int, built: Path) -> Tables:
    """The program of Llama 2's 7B, planned and not built: there are no weights."""
    hidden, wide, vocabulary = 4096, 11008, 32000
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": n_layers, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": wide,
        "vocab_size": vocabulary, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(n_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (wide, hidden) for p in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (hidden, wide)}
        shapes |= {f"{layer}.{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}

    def never(name: str) -> Array:
        raise AssertionError(f"{name} was read")

    source = Source(
        module=build_model(read_config(raw)), weights=Weights(shapes, never), max_context=4096, architecture="Llama"
    )
    plan = plan_engine(source, BuildOptions(precision=precision_map("w4a8")))
    engine = Engine.open(built)
    cpu = msgspec.structs.replace(
        engine.manifest.cpu, activation_bytes=plan.program.memory.total_bytes,
        activation_lower_bound=plan.program.memory.lower_bound,
    )  # fmt: skip
    tables = Tables(replace(engine, manifest=msgspec.structs.replace(engine.manifest, cpu=cpu)))
    program = program_table(plan.program, dict.fromkeys(plan.program.weights_offsets, ""))
    tables.__dict__["program"] = msgspec.convert(program, ProgramTable)
    tables.__dict__["graph"] = msgspec.json.decode(msgspec.json.encode(graph_table(plan.traced)), type=GraphTable)
    return tables


def test_a_large_model_s_page_is_small_and_what_it_says_is_what_was_planned(built_tiny: Path) -> None:
    tables = large(32, built_tiny)
    text = engine_page(tables, None)
    assert len(text) < 400_000 and all(f"model.layers.{i}<" in text for i in range(32))
    assert len(Page(text).blocks()) == len(tables.program.buffers) > 290
    buffers, bound = tables.program.buffers, tables.engine.manifest.cpu.activation_lower_bound
    assert bound - 64 * len(buffers) <= max(alive(buffers, len(tables.calls))) <= bound, "rounded up to 64 each"


def test_an_encoder_has_a_page_of_its_own_words(tmp_path: Path) -> None:
    engine = build_engine("bert", random_encoder(tmp_path / "m"), tmp_path / "e", BuildSettings(tune=0))
    text = " ".join(Page(engine_page(Tables(engine), None)).text)
    assert "A run reads" in text and "encoder.layer.1" in text and "keys and values written for this step" in text
    assert "0.5 * x * (1 + erf(0.7071 * x)) in the epilogue" in text
    assert not re.search(r"decoding|KV cache|rotated|\brope\b|KV pages|KV write", text)


def test_names_are_text_and_bounded(tmp_path: Path, roofline: Roofline) -> None:
    name = '<img src=x onerror="alert(1)">'
    engine = build_engine(name, BUNDLED / "tiny", tmp_path / "e", BuildSettings(max_context=64, tune=0))
    tables, bad = Tables(engine), "<script>alert(1)</script>" * 400
    program = tables.program
    calls = [
        msgspec.structs.replace(c, kernel=bad, note=bad, expression=bad, origin=[bad]) for c in program.calls
    ] * 120
    calls[:2] = [msgspec.structs.replace(c, kernel="matmul", operands={}, params={}) for c in calls[:2]]
    weights = [msgspec.structs.replace(w, name=bad, format=bad) for w in program.weights] * 120
    buffers = [msgspec.structs.replace(b, name=bad) for b in program.buffers]
    nodes = [msgspec.structs.replace(n, op=bad, origin=[bad], attrs={"tree": bad}) for n in tables.graph.nodes]
    tables.__dict__["program"] = msgspec.structs.replace(program, calls=calls, weights=weights, buffers=buffers)
    tables.__dict__["graph"] = GraphTable(nodes)
    text = engine_page(tables, roofline)
    assert len(text) < 8_000_000, "an engine of a million calls makes no page of a gigabyte"
    assert {tag for tag, _ in Page(text).tags}.isdisjoint({"script", "img"})
    assert "&lt;img src=x" in text and "the first 4096 of them" in text


def test_the_file(millrace: Millrace, built_tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert "page.html" in millrace("inspect", built_tiny, "--html", file).err
    first = file.read_text()
    told = json.loads(millrace("inspect", built_tiny, "--html", file, "--json").out)  # one of ours is made anew
    assert told == {"html": str(file), "bytes": len(first.encode())} and file.read_text() == first
    file.write_text("a letter to my mother")
    millrace("inspect", built_tiny, "--html", file).assert_mistake("already there, and is no page of millrace")
    assert file.read_text() == "a letter to my mother"
    millrace("inspect", built_tiny, "--html", tmp_path).assert_mistake("already there")
    millrace("inspect", built_tiny, "--html", tmp_path / "no" / "page").assert_mistake("cannot write", "No such file")
    millrace("inspect", built_tiny, "--html", file, "--calls").assert_mistake("--calls and --html are both given")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["page.html"], "nothing is left behind"


def test_on_a_narrow_screen_nothing_shrinks_below_reading_size(built_tiny: Path) -> None:
    """Chart and tables scroll sideways, by keys too; a shadow that does not move says that there is more."""
    page = engine_page(Tables(Engine.open(built_tiny)), None)

    def pixels(rule: str, name: str) -> int:
        return int(re.findall(rf"{rule} {{[^}}]*{name}: (\d+)px", page)[0])

    least = pixels(r"\.wide > svg", "min-width")
    assert pixels("svg text", "font") * least / WIDTH >= 10 and pixels(r"\.wide > table", "min-width") >= 700
    assert least <= pixels("main", "max-width") - 2 * 20, "at full width nothing scrolls"
    assert len(re.findall(r'<div class="wide" tabindex="0">\s*<(?:table|svg viewBox="0 0 1080)', page)) == 5
    assert page.count("<table") == 4 and page.count('role="img"') == 1
    (wide,) = re.findall(r"\.wide { ([^}]*)}", page)
    assert "overflow-x: auto" in wide and wide.count("no-repeat local") == wide.count("no-repeat scroll") == 2


def test_two_pages_of_one_engine_are_equal(built_tiny: Path) -> None:
    assert engine_page(Tables(Engine.open(built_tiny)), None) == engine_page(Tables(Engine.open(built_tiny)), None)
