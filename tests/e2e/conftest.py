"""Engines and servers that the tests here share; nothing touches the user's engine cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.source import Source
from tests.e2e.live import Live, live
from tests.support.cache import own_cache
from tests.support.checkpoints import random_checkpoint
from tests.support.shared import shared


def built(checkpoint: Path, out: Path, precision: str, max_context: int | None = None) -> Path:
    """An engine folder with the step sizes that `millrace build` chooses."""
    source = Source.from_checkpoint(Checkpoint.open(checkpoint), max_context)
    options = BuildOptions(precision=precision_map(precision))
    write_engine(source, plan_engine(source, options), out, name="e2e")
    return out


@pytest.fixture(scope="package", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with own_cache(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="package")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="package")
def stories_engine(engines: Path) -> Path:
    """FP32, so that its numbers can be compared with transformers'; no chat template; a context of 512."""
    return built(shared("models/stories260K"), engines / "stories", "fp32")


@pytest.fixture(scope="package")
def tiny_engine(engines: Path) -> Path:
    return built(BUNDLED / "tiny", engines / "tiny", "w4a8")


@pytest.fixture(scope="package")
def stories(stories_engine: Path) -> Iterator[Live]:
    with live(stories_engine) as server:
        yield server


@pytest.fixture(scope="package")
def tiny(tiny_engine: Path) -> Iterator[Live]:
    with live(tiny_engine) as server:
        yield server


@pytest.fixture(scope="package")
def stories_client(stories: Live) -> Iterator[openai.OpenAI]:
    with stories.client() as client:
        yield client


@pytest.fixture(scope="package")
def tiny_client(tiny: Live) -> Iterator[openai.OpenAI]:
    with tiny.client() as client:
        yield client


@pytest.fixture(scope="package")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """76 M parameters with random values and a context of 32 Ki tokens: a step of some milliseconds."""
    sizes: dict[str, Any] = {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 700, "max_position_embeddings": 32768,
    }  # fmt: skip
    return random_checkpoint(tmp_path_factory.mktemp("large"), "llama", dtype="bfloat16", **sizes)
