"""Bounds that no engine can have are refused when it is built, in the author's words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import SCORED_ROWS, BuildOptions, plan_engine, write_engine
from millrace.compile.lower_cpu.program import Bounds
from millrace.compile.precision import precision_map
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from millrace.errors import ConfigError
from millrace.model.layers import Linear
from millrace.model.module import Module, Signature
from millrace.model.tensor import Tensor


@pytest.fixture(scope="module")
def tiny() -> Source:
    return Source.from_checkpoint(Checkpoint.open(BUNDLED / "tiny"))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"profile": {"S": Bounds(1, 8, 64), "T": Bounds(1, 16, 32)}}, 32),
        ({"profile": {"S": Bounds(1, 8, 16 + SCORED_ROWS + 1)}}, 16 + SCORED_ROWS),
        ({"profile": {"R": Bounds(1, 2, 4)}}, 4),
        ({"profile": {"T": Bounds(1, 8, 15)}}, 15),
        ({"profile": {"T": Bounds(1, 8, 15)}, "max_batch": 15}, None),
        ({"profile": {"S": Bounds(1, 8, 16 + SCORED_ROWS)}}, None),
        ({"profile": {"R": Bounds(1, 2, 16)}}, None),
    ],
    ids=str,
)
def test_a_step_has_a_token_and_a_row_for_each_sequence(
    tiny: Source, options: dict[str, Any], most: int | None
) -> None:
    if most is None:
        high = {s.name: b.high for s, b in plan_engine(tiny, BuildOptions(**options)).program.symbols.items()}
        assert high["S"] <= min(high["T"], high["R"])
        return
    with pytest.raises(ConfigError, match="more sequences than") as error:
        plan_engine(tiny, BuildOptions(**options))
    assert error.value.expected == f"at most {most}: a token and a row for each" and "lower S" in error.value.fix


@pytest.mark.parametrize("rows", ["batch", "R"])
def test_logits_of_other_dimensions(rows: str, tmp_path: Path) -> None:
    """An engine that nobody could open is not written."""

    class Scorer(Module):
        signature = Signature({"x": (rows, 32)}, ("logits",))

        def __init__(self) -> None:
            self.a = Linear(32, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    source = Source.from_module(Scorer(), {"a.weight": np.ones((24, 32), np.float32)}, max_context=8)
    profile = {"batch": Bounds(1, 4, 8)} if rows == "batch" else {}
    plan = plan_engine(source, BuildOptions(precision=precision_map("fp32"), profile=profile))
    with pytest.raises(
        ConfigError, match="no engine can be made of Scorer: it is of a language model without T"
    ) as error:
        write_engine(source, plan, tmp_path / "engine", name="scorer")
    assert "call its outputs otherwise" in error.value.fix and not (tmp_path / "engine").exists()
