"""A text read piece by piece gives the very bits of the engine that is then built, with one piece in memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, plan_pieces, write_engine
from millrace.compile.lower_cpu.program import Bounds, Program
from millrace.compile.precision import precision_map
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.engine.native.executor import NativeExecutor, NativeProgram
from millrace.evaluate import piecewise_forward
from millrace.evaluate.divergence import DivergenceScore, log_probabilities
from millrace.evaluate.piecewise_forward import answers, read, score
from millrace.evaluate.text_windows import Windows
from tests.support.checkpoints import random_checkpoint

N = 150  # tokens of a window: three pages, the last of them begun


def text(vocab: int, n_windows: int = 2) -> Windows:
    ids = np.random.default_rng(5).integers(3, vocab, (n_windows, N)).astype(np.int32)
    return Windows(ids, N // 2)


def planned(source: Source, options: BuildOptions) -> tuple[Program, ...]:
    return tuple(
        plan_pieces(source, replace(options, max_batch=1, max_step_tokens=N, profile={"R": Bounds(1, 13, 13)}))
    )


def of_the_engine(source: Source, options: BuildOptions, found: Windows, out: Path) -> list[NDArray[np.float32]]:
    write_engine(source, plan_engine(source, options), out, name="test")
    executor = Engine.open(out).executor(n_pages=4)
    try:
        return [log_probabilities(executor, ids, found.first) for ids in found.ids]
    finally:
        executor.close()


def piecewise(
    source: Source, options: BuildOptions, found: Windows, monkeypatch: pytest.MonkeyPatch
) -> list[NDArray[np.float32]]:
    """As `score` sees them, beside themselves."""
    seen: list[NDArray[np.float32]] = []

    class Spy(DivergenceScore):
        def add(self, found: NDArray[np.float32], reference: NDArray[np.float32], targets: NDArray[np.int32]) -> None:
            assert (found == reference).all()
            seen.append(found)

    monkeypatch.setattr(piecewise_forward, "DivergenceScore", Spy)
    one = read(planned(source, options), found, source.vocab_size, lambda: None)
    with answers(one, source.vocab_size) as found_again:
        score(found_again, found_again, found)
    return seen


TINY: tuple[tuple[object, dict[str, object]], ...] = (
    ("w4a8", {}), ("w4a8", {"head": "w4a8"}),  # a head in two steps
    ("w4a8", {"kv_format": KvFormat.INT8}), ("w4a16", {}), ("w8a8", {"tiles": True}), ("w8a16", {}), ("bf16", {}),
    ("fp8a16", {}), ("bf16", {"tiles": True}), ("fp32", {}), ("fp32", {"kv_format": KvFormat.BF16}),
    ({"default": "w4a8", "layers.0.*": "bf16", "lm_head": "w8a8"}, {}),
)  # fmt: skip


@pytest.mark.parametrize(("precision", "others"), TINY, ids=str)
def test_the_bits_are_those_of_the_engine(
    precision: object, others: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source.from_checkpoint(Checkpoint.open(BUNDLED / "tiny"))
    asked = precision_map(precision, 32, others.get("head"))  # type: ignore[arg-type]
    rest = {name: value for name, value in others.items() if name != "head"}
    options, found = BuildOptions(precision=asked, **rest), text(source.vocab_size)  # type: ignore[arg-type]
    whole, parts = (
        of_the_engine(source, options, found, tmp_path / "e"),
        piecewise(source, options, found, monkeypatch),
    )
    assert len(whole) == len(parts) == 2 and all((a == b).all() for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma", "mistral", "gemma2", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("precision", ["w4a8", "bf16"])
def test_of_every_kind_of_family(family: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that fit nothing evenly, biases, norms of heads, a scaled embedding, a tied head, windows, states."""
    source = Source.from_checkpoint(Checkpoint.open(random_checkpoint(tmp_path / "c", family, seed=2)))
    options, found = BuildOptions(precision=precision_map(precision)), text(source.vocab_size, 1)
    whole = of_the_engine(source, options, found, tmp_path / "e")
    assert (whole[0] == piecewise(source, options, found, monkeypatch)[0]).all()


def test_memory_holds_the_weights_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two where the logits of two are compared; what was packed is let go of as soon as the core has it."""
    source = Source.from_checkpoint(Checkpoint.open(BUNDLED / "tiny"))
    programs, found = planned(source, BuildOptions(precision=precision_map("w8a8"))), text(source.vocab_size, 1)
    alive, most, loads = 0, 0, 0

    class Counted(NativeExecutor):
        def __init__(self, program: NativeProgram, **others: Any) -> None:
            nonlocal alive, most, loads
            super().__init__(program, **others)
            self.nbytes = program.weights_bytes
            alive, loads = alive + self.nbytes, loads + 1
            most = max(most, alive)
            assert isinstance(self._program.weights, np.ndarray) and self._program.weights.size == 0

        def close(self) -> None:
            nonlocal alive
            alive -= self.nbytes
            super().close()

    monkeypatch.setattr(piecewise_forward, "NativeExecutor", Counted)
    one = read(programs, found, source.vocab_size, lambda: None)
    assert most == max(p.weights_bytes for p in programs[:-1]) and (alive, loads) == (0, len(programs) - 1)
    assert most < sum(p.weights_bytes for p in programs) / 3
    with answers(one, source.vocab_size) as exact, answers(one, source.vocab_size) as rough:
        score(exact, rough, found)
    assert (alive, most) == (0, max(most, 2 * programs[-1].weights_bytes))
