"""Defaults that `--help` states are those that a run uses."""

import re

import pytest

from millrace.checkpoint.config.generation_config import LLAMA_CPP, GenerationDefaults
from millrace.runtime.request.sampling_params import SamplingParams, resolve
from tests.cli.conftest import Millrace
from tests.runtime.fakes import LIMITS


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_help_states_the_defaults_of_models_and_of_gguf_files(millrace: Millrace, command: str) -> None:
    text = " ".join(millrace(command, "--help").out.split())
    row = resolve(SamplingParams(), GenerationDefaults(), LIMITS, 1).row[0]
    for name in ("temperature", "top_p", "top_k", "min_p"):
        flag = "--" + name.replace("_", "-")
        (described,) = re.findall(rf"{flag} [A-Z] (.*?\))", text)
        assert f"default: the model's, or {row[name]:g} (a GGUF file: {LLAMA_CPP[name]})" in described
