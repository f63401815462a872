"""Answers as they were recorded: a change of the compiler or the kernels that is not meant to change them does not.

`python -m tests.engine.test_golden` records anew, for a change that is; say in its commit what moved them, and why.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from millrace.engine.artifact.engine import Engine
from millrace.engine.cache_specs import KvFormat
from millrace.kernels.library import usable_isas
from millrace.kernels.precision import BF16_BY_TILES
from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.engines import build, last_logits

RECORDED = Path(__file__).parent / "golden.json"
# Every family in the plainest and the most fused precision, one of them in all; lengths around blocks and pages.
CASES = (
    *((family, precision) for family in FAMILIES for precision in ("fp32", "w4a8")),
    *(("qwen3", precision) for precision in ("bf16", BF16_BY_TILES, "w8a8", "w8a16", "w4a16", "fp8a16")),
    *(("qwen3", precision) for precision in ("bf16 over int8", "w8a8 over f32", "w8a8 by tiles")),
    *(("qwen3", precision) for precision in ("bf16 over fp8", "bf16 over int4")),
    ("gemma", BF16_BY_TILES),
)
LENGTHS = (1, 3, 17, 63, 64, 65, 40)


def digests(engine: Engine, isa: str) -> str:
    """Of the logits behind prompts of mixed lengths, all in one step, and again in turns with what came before kept."""
    executor = engine.executor(n_pages=16, isa=isa)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 1003, n).tolist() for n in LENGTHS]
    together = last_logits(engine, executor, prompts)
    alone = np.concatenate([last_logits(engine, executor, [p]) for p in prompts])
    executor.close()
    assert np.isfinite(together).all() and (together.view(np.int32) == alone.view(np.int32)).all()
    return hashlib.blake2b(together.tobytes(), digest_size=16).hexdigest()


def built(folder: Path, family: str, precision: str) -> Engine:
    checkpoint = folder / family
    if not checkpoint.exists():
        random_checkpoint(checkpoint, family, seed=11)
    name, _, kv = precision.partition(" over ")
    out = folder / f"{family} {precision}".replace(" ", "-")
    return build(checkpoint, out, name, group=64, max_step_tokens=256, kv=KvFormat[kv.upper()] if kv else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_logits_are_as_recorded(folder: Path, family: str, precision: str) -> None:
    recorded: dict[str, str] = json.loads(RECORDED.read_text())
    engine = built(folder, family, precision)
    assert {isa: digests(engine, isa) for isa in usable_isas()} == dict.fromkeys(
        usable_isas(), recorded[f"{family} {precision}"]
    )


def record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {f"{f} {p}": digests(built(Path(folder), f, p), usable_isas()[0]) for f, p in CASES}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record()
