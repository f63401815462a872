"""What a decode step must at least do, counted again from the checkpoint's own shapes."""

import math
from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.resolve_model import BUNDLED
from millrace.engine.decode_roofline import DecodeWork
from millrace.machine.roofline import Compute, MemoryLevel, Rate, Roofline
from tests.support.engines import build

RATE = Rate(1e9, 1e9, 1e9)
SLOW_MEMORY = Roofline(1, (MemoryLevel("DRAM", None, RATE, RATE),), (Compute("fp32", RATE, Rate(1e15, 0, 0), None),))


def test_products_and_keys_are_counted_once_for_each_token(tmp_path: Path) -> None:
    engine = build(BUNDLED / "tiny", tmp_path / "engine", "fp32")
    checkpoint = Checkpoint.open(BUNDLED / "tiny")
    config, shapes = checkpoint.decoder, {name: info.shape for name, info in checkpoint.tensors.items()}
    table = () if config.tie_embeddings else ("model.embed_tokens.weight",)  # tied, it is the head, and read whole
    n_weights = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in table)

    work = DecodeWork.from_engine(engine)
    assert work.operations == {"fp32": 2 * n_weights}
    assert n_weights * 4 <= work.weights_bytes <= n_weights * 4 * 1.2, "a little is padding"
    assert work.kv_bytes_per_token == config.n_layers * 2 * config.n_kv_heads * config.head_dim * 4

    alone, many = work.bound(SLOW_MEMORY, 1, 0), work.bound(SLOW_MEMORY, 8, 1000)
    assert alone.seconds == pytest.approx(work.weights_bytes / 1e9) and alone.by == "reading from DRAM"
    assert many.seconds == pytest.approx(alone.seconds + 1000 * work.kv_bytes_per_token / 1e9)


def test_arithmetic_grows_with_the_sequences() -> None:
    work = DecodeWork(10, 0, {"bf16": 100, "w8a8": 50})
    slow = Rate(1.0, 1.0, 1.0)
    roofline = Roofline(
        1, (MemoryLevel("L1", None, RATE, RATE),), tuple(Compute(p, slow, slow, None) for p in ("bf16", "w8a8"))
    )
    assert work.bound(roofline, 3, 0).seconds == pytest.approx(450) and "arithmetic" in work.bound(roofline, 3, 0).by
