"""Each cell of docs/models.md: a family in a format, from the checkpoint's files to logits.

`python -m tools.model_table` runs these tests and writes the page. What a float engine computes is compared with
transformers in float64; engines with integers with the reference interpreter, on the same codes.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.config.families.all_families import FAMILIES as NATIVE
from tests.engine.test_reference import assert_agree
from tests.families.test_against_transformers import random_prompts, truth
from tests.support.checkpoints import EXPERT_FAMILIES, FAMILIES, LATER_FAMILIES, random_checkpoint
from tests.support.engines import build, last_logits
from tests.support.gguf_converter import OVERRIDES, convert
from tests.support.gguf_files import FAMILIES as FIRST_IN_FILES
from tests.support.gguf_files import write_gguf
from tests.support.gptq_awq_files import Packing, write_packed
from tests.support.tolerance import assert_no_worse

torch = pytest.importorskip("torch", reason="transformers needs it")
ROOT = Path(__file__).parents[2]
DECODERS = (*FAMILIES, *LATER_FAMILIES, *EXPERT_FAMILIES)
STACKED = ("granitemoe", "gpt_oss")  # whose experts are one tensor, which these formats do not have
# Sizes of which words of eight codes and groups of 32 are made.
EVEN: Mapping[str, Mapping[str, Any]] = {
    "olmoe": {"intermediate_size": 96}, "mixtral": {"intermediate_size": 96}, "phimoe": {"intermediate_size": 96},
}  # fmt: skip


def logits(folder: Path, out: Path, precision: str, prompts: list[list[int]]) -> Any:
    engine = build(folder, out, precision)
    with closing(engine.executor(n_pages=16)) as executor:
        return last_logits(engine, executor, prompts)


def check_floats(family: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "checkpoint", family, seed=7)
    prompts = random_prompts(7, 1003)
    if family == "phi3":  # transformers' LongRoPE depends on the sequence, an engine's on its context
        prompts = [prompt for prompt in prompts if len(prompt) > 64]
    ours = logits(folder, tmp_path / "engine", "fp32", prompts)
    exact, theirs = truth(folder, torch.float64, prompts), truth(folder, torch.float32, prompts)
    for row in range(len(prompts)):
        assert_no_worse(ours[row], theirs[row], exact[row], factor=3.0, ulps=48)


def check_precision(precision: str) -> Callable[[str, Path], None]:
    def check(family: str, tmp_path: Path) -> None:
        assert_agree(random_checkpoint(tmp_path / "checkpoint", family, seed=5), precision, tmp_path)

    return check


def check_packed(packing: Packing) -> Callable[[str, Path], None]:
    def check(family: str, tmp_path: Path) -> None:
        if family in STACKED:
            pytest.skip("experts are stored as one tensor")
        own = {"intermediate_size": 384} if "intermediate_size" not in EVEN.get(family, {}) else EVEN[family]
        own = {**own, **({"moe_intermediate_size": 96} if "moe" in family and family not in EVEN else {})}
        own |= {"shared_expert_intermediate_size": 96} if family == "qwen2_moe" else {}
        folder = random_checkpoint(tmp_path / "floats", family, seed=5, **own)
        write_packed(tmp_path / "packed", folder, packing, seed=1)
        assert_agree(tmp_path / "packed", "w4a16", tmp_path)

    return check


def check_gguf(family: str, tmp_path: Path) -> None:
    """Engines of the folder and of its file give the same bits."""
    if family not in FIRST_IN_FILES and family not in OVERRIDES:
        pytest.skip("llama.cpp has it under another name, or not at all")
    first = family in FIRST_IN_FILES
    own = FIRST_IN_FILES[family] if first else OVERRIDES[family]
    folder = random_checkpoint(tmp_path / "folder", family, seed=3, **own)
    file = (write_gguf if first else convert)(tmp_path / "model.gguf", folder)
    prompts = random_prompts(3, 1003)
    ours, theirs = (logits(path, tmp_path / str(i), "fp32", prompts) for i, path in enumerate((file, folder)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)  # numbers of the configuration are float32 in files


FORMATS: Mapping[str, Callable[[str, Path], None]] = {
    "float": check_floats,
    "FP8": check_precision("fp8a16"),
    "W8A8": check_precision("w8a8"),
    "W4A8": check_precision("w4a8"),
    "GPTQ": check_packed(Packing()),
    "AWQ": check_packed(Packing("gemm", symmetric=False, mantissa=7)),
    "GGUF": check_gguf,
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("format", FORMATS)
def test_cell(format: str, family: str, tmp_path: Path) -> None:
    FORMATS[format](family, tmp_path)


def test_the_page_lists_every_architecture() -> None:
    """After a new family: `python -m tools.model_table`."""
    page = (ROOT / "docs" / "models.md").read_text()
    assert {name for name, family in NATIVE.items() if not family.is_encoder} == set(DECODERS)
    missing = [family.architecture for family in NATIVE.values() if f"`{family.architecture}`" not in page]
    assert not missing
