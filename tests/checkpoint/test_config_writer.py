"""A configuration that is written again is read as the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.config_writer import config_json
from millrace.checkpoint.config.model_config import read_config
from millrace.checkpoint.config.rope_config import RopeConfig
from millrace.errors import CheckpointError
from tests.support.checkpoints import FAMILIES, random_checkpoint

ROPES = (
    RopeConfig(theta=1e6), RopeConfig(theta=1e4, kind="linear", factor=4.0),
    RopeConfig(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_positions=8192),
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    config = replace(Checkpoint.open(random_checkpoint(tmp_path, family)).decoder, notes=())
    for rope in ROPES:
        one = replace(config, rope=rope)
        assert read_config(config_json(one)) == one
    with pytest.raises(CheckpointError, match="rope_freqs"):
        config_json(replace(config, rope=RopeConfig(theta=1e4, divisors=(1.0,))))
