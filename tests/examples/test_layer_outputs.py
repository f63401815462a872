"""What the example hands out is what transformers has between its layers."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from millrace.compile.resolve_model import BUNDLED

ROOT = Path(__file__).parents[2]


def test_it_hands_out_what_is_between_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    example = runpy.run_path(str(ROOT / "examples" / "layer_outputs.py"))
    kept = example["main"]()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5 and all(f"{name}: 5 tokens" in line for name, line in zip(kept, said[1:], strict=True))
    ids = transformers.AutoTokenizer.from_pretrained(BUNDLED / "tiny")("Once upon a time").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / "tiny", dtype=torch.float64)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for i, got in enumerate(kept.values()):
        exact = states[i + 1][0].numpy()
        if i + 1 < len(states) - 1:  # the last of transformers' is behind the final norm
            assert got.shape == exact.shape and np.abs(got - exact).max() < 0.02 * np.abs(exact).max()
