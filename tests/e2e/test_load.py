"""The load of the nights, for some seconds: many clients of one long prompt, of whom a third goes away."""

import json
from pathlib import Path

import pytest

from tools.load.__main__ import MAX_GROWTH_BYTES, main


def test_200_clients_of_one_prompt(tiny_engine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = main([str(tiny_engine), "--seconds", "9", "--questions", "8"])
    outcome = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert code == 0, outcome  # pages are too few: some were evicted, and answers gave way
    assert (
        outcome["wrong"] == 0 and outcome["answers"] > 100 and outcome["left"] > 25 and outcome["tokens_reused"] > 0.9
    )
    most = MAX_GROWTH_BYTES / 2  # of a load whose last answers come some seconds after its ten
    assert outcome["grown_bytes"] < most, "a search for cycles too late had shown by then"
