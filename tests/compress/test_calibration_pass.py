"""Statistics against what transformers' own layers read in float64; going on, and what a folder refuses."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibration import calibration_pass as collecting
from millrace.compress.calibration.calibrated_methods import statistics_of
from millrace.compress.calibration.calibration_pass import collect, samples
from millrace.compress.calibration.statistics import (
    ABOUT,
    CalibrationStatistics,
    InputStatistics,
    StatisticsInfo,
    StatisticsWriter,
    piece_file,
    read_about,
    writing,
)
from millrace.errors import ConfigError, MachineError
from millrace.evaluate.text_windows import Windows
from millrace.kernels.precision import Precision
from tests.support.checkpoints import random_checkpoint

TEXT = (BUNDLED / "calibration.txt").read_text()


class Collected(NamedTuple):
    source: Source
    text: Windows
    folder: Path
    found: CalibrationStatistics


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collected]:
    """Batches of 70 rows, which windows of 48 do not fill evenly."""
    checkpoint = Checkpoint.open(BUNDLED / "tiny")
    source, text = Source.from_checkpoint(checkpoint), samples(checkpoint.tokenizer, TEXT, 5, 48)
    folder = tmp_path_factory.mktemp("statistics") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "_BATCH", 70)
        yield Collected(source, text, folder, collect(source, text, folder))


def test_they_are_of_what_transformers_layers_read(tiny: Collected) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / "tiny", dtype=torch.float64)
    rows: dict[str, list[np.ndarray[Any, Any]]] = {}

    def hook(name: str) -> Any:
        return lambda _, inputs: rows.setdefault(name, []).append(inputs[0][0].numpy().copy())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for ids in tiny.text.ids:
            model(torch.tensor(ids[None].astype(np.int64)))
    assert set(tiny.found) == set(rows) and tiny.found.about.tokens == tiny.text.ids.size
    for name, parts in rows.items():
        x, ours = np.concatenate(parts), tiny.found[name]
        assert name in ours.linears and len(x) == tiny.text.ids.size
        scale = np.sqrt(np.outer(*[np.square(x).mean(axis=0)] * 2))
        assert np.abs(ours.gram - x.T @ x / len(x)).max() <= 2e-5 * scale.max()
        assert ours.amax == pytest.approx(np.abs(x).max(axis=0), rel=1e-4, abs=1e-6)
        assert ours.mean == pytest.approx(np.abs(x).mean(axis=0), rel=1e-4, abs=1e-6)


def test_layers_that_read_the_same_share_it(tiny: Collected) -> None:
    of_first = [tuple(n.removeprefix("model.layers.0.") for n in names) for names in tiny.found.shared[:4]]
    assert of_first == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
    ]  # fmt: skip
    assert not list(tiny.folder.glob("carried-*")) and not list(tiny.folder.glob("*.part"))


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_other_families_and_bfloat16(family: str, tmp_path: Path) -> None:
    """The same layers, in both precisions nearly the same numbers; sizes that fit nothing evenly."""
    source = Source.from_checkpoint(Checkpoint.open(random_checkpoint(tmp_path / "c", family, seed=2)))
    text = Windows(np.random.default_rng(1).integers(3, source.vocab_size, (2, 40)).astype(np.int32), 0)
    exact = collect(source, text, tmp_path / "fp32")
    rough = collect(source, text, tmp_path / "bf16", precision=Precision.BF16)
    products = {n.removesuffix(".weight") for n in source.weights.shapes if n.endswith("_proj.weight")}
    assert set(exact) == set(rough) == products
    for name in exact:
        assert np.isfinite(exact[name].gram).all()
        assert np.abs(exact[name].gram - rough[name].gram).max() < 0.2 * np.abs(exact[name].gram).max()


class EndedError(Exception):
    """As kill -9 ends a run."""


def test_a_run_that_was_ended_goes_on(tiny: Collected, tmp_path: Path) -> None:
    """Piece by piece, each run ended after one: all files are those of a run that was not."""
    pieces, folder = tiny.found.about.pieces, tmp_path / "s"
    done: list[int] = []

    def end(_: str, piece: int, of: int) -> None:
        done.append(piece)
        if len(done) > 1 and piece < of:
            raise EndedError

    while not done or done[-1] < pieces:
        begun, done = (done[-1] if done else 0), []
        (folder / "carried-900.part").parent.mkdir(exist_ok=True)
        (folder / f"piece-{begun:03}.part").write_bytes(b"what was cut off")
        try:
            collect(tiny.source, tiny.text, folder, progress=end)
        except EndedError:
            assert done == [begun, begun + 1], "the pieces before are not done again"
    for number in range(pieces):
        assert piece_file(folder, number).read_bytes() == piece_file(tiny.folder, number).read_bytes()
    done.clear()
    collect(tiny.source, tiny.text, folder, progress=lambda _, piece, of: done.append(piece))
    assert done == [pieces], "of a folder that is complete nothing is read again"


def test_what_is_carried_is_made_again_where_it_is_lost(tiny: Collected, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(tiny.folder, folder)
    piece_file(folder, 2).unlink()
    begun: list[int] = []
    collect(tiny.source, tiny.text, folder, progress=lambda _, piece, of: begun.append(piece))
    assert begun[0] == 0 and piece_file(folder, 2).read_bytes() == piece_file(tiny.folder, 2).read_bytes()


@pytest.mark.parametrize("where", [10, 200, -1])
def test_a_damaged_file_is_one_error(where: int, tiny: Collected, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(tiny.folder, folder)
    file = piece_file(folder, 1)
    data = bytearray(file.read_bytes())
    data[where] ^= 0x55
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"piece-001 is (damaged|of another)") as error:
        found = CalibrationStatistics.open(folder)
        [found[name] for name in found]
    assert "remove the folder, and collect again" in error.value.fix, "one piece alone is not made again"
    file.write_bytes(data[:-4])
    with pytest.raises(ConfigError, match=r"piece-001 is (damaged|of another)"):
        CalibrationStatistics.open(folder)


def rewritten(folder: Path, gram: np.ndarray[Any, Any]) -> Path:
    """The first inputs of a layer have this Gram matrix, with checksums as they should be."""
    about, K = read_about(folder), len(gram)
    first = CalibrationStatistics.open(folder)["model.layers.0.self_attn.q_proj"]
    second = CalibrationStatistics.open(folder)["model.layers.0.self_attn.o_proj"]
    given = InputStatistics(first.linears, gram, np.ones(K, np.float32), np.ones(K, np.float32))
    StatisticsWriter(folder, about).add(1, [given, second])
    return folder


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_values_that_no_inputs_have(value: float, tiny: Collected, tmp_path: Path) -> None:
    shutil.copytree(tiny.folder, tmp_path / "s")
    gram = np.eye(256, dtype=np.float32)
    gram[7, 7] = value
    found = CalibrationStatistics.open(rewritten(tmp_path / "s", gram))
    with pytest.raises(ConfigError, match="piece-001 has values that no inputs have"):
        _ = found["model.layers.0.self_attn.q_proj"]


def test_statistics_of_other_sizes_than_the_weights(tiny: Collected, tmp_path: Path) -> None:
    shutil.copytree(tiny.folder, tmp_path / "s")
    checkpoint = Checkpoint.open(BUNDLED / "tiny")
    assert set(statistics_of(checkpoint, None, tmp_path / "s", lambda *_: None)) == set(tiny.found)
    rewritten(tmp_path / "s", np.eye(128, dtype=np.float32))
    with pytest.raises(ConfigError, match=r"q_proj are of 128 inputs\n.*256"):
        statistics_of(checkpoint, None, tmp_path / "s", lambda *_: None)


def test_a_folder_is_of_one_model_text_and_version(tiny: Collected, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are of another text"):
        collect(tiny.source, Windows(tiny.text.ids[:, ::-1].copy(), 0), tiny.folder)
    with pytest.raises(ConfigError, match="precision fp32"):
        collect(tiny.source, tiny.text, tiny.folder, precision=Precision.BF16)
    about = (tiny.folder / ABOUT).read_text()
    (tmp_path / ABOUT).write_text(about.replace('"version":1', '"version":2'))
    with pytest.raises(ConfigError, match="of version 2"):
        CalibrationStatistics.open(tmp_path)
    (tmp_path / ABOUT).write_text(about[:-9])
    with pytest.raises(ConfigError, match="damaged"):
        CalibrationStatistics.open(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        CalibrationStatistics.open(tmp_path / "nowhere")
    (tmp_path / ABOUT).write_text(about)
    with pytest.raises(ConfigError, match="not complete: 0 of"):
        CalibrationStatistics.open(tmp_path)


def test_a_folder_is_written_by_one_run(tmp_path: Path) -> None:
    about = StatisticsInfo(model="m", text="t", tokens=1, precision="fp32", pieces=1)
    with writing(tmp_path, about), pytest.raises(ConfigError, match="by another run"), writing(tmp_path, about):
        pass
    with writing(tmp_path, about) as kept:
        assert kept.next == 0


def test_what_cannot_be_collected_is_said_before(tiny: Collected, tmp_path: Path, monkeypatch: Any) -> None:
    tokenizer = Checkpoint.open(BUNDLED / "tiny").tokenizer
    for text, n in (("", 1), ("Too short.", 1), (TEXT, 1000), (TEXT, 0)):
        with pytest.raises(ConfigError, match="text for statistics has"):
            samples(tokenizer, text, n)
    with pytest.raises(ConfigError) as error:
        samples(tokenizer, TEXT, 1000, 48)
    fewer = int(error.value.fix.rpartition("--samples ")[2])
    assert samples(tokenizer, TEXT, fewer, 48).ids.shape == (fewer, 48), "what it says can be done"
    with pytest.raises(ConfigError, match="text for statistics"):
        samples(tokenizer, TEXT, fewer + 1, 48)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(MachineError, match="1,000 are free"):
        collect(tiny.source, tiny.text, tmp_path / "s")
    assert not list((tmp_path / "s").glob("piece-*"))
