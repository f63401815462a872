"""Environment variables say where, never what."""

from pathlib import Path

import pytest

from millrace.env import read_env
from millrace.errors import ConfigError


def test_nothing_set() -> None:
    env = read_env({})
    assert env.cache == Path.home() / ".cache" / "millrace"
    assert (env.hf_home, env.hf_token, env.hf_offline) == (None, None, False)


def test_everything_set() -> None:
    env = read_env({"XDG_CACHE_HOME": "/c", "HF_HOME": "/h", "HF_TOKEN": "t", "HF_HUB_OFFLINE": "1"})
    assert (env.cache, env.hf_home, env.hf_token, env.hf_offline) == (Path("/c/millrace"), Path("/h"), "t", True)


def test_empty_means_unset() -> None:
    names = ("XDG_CACHE_HOME", "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE")
    assert read_env(dict.fromkeys(names, "")) == read_env({})


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "Yes", "on"])
def test_true(text: str) -> None:
    assert read_env({"HF_HUB_OFFLINE": text}).hf_offline


@pytest.mark.parametrize("text", ["0", "false", "False", "NO", "off"])
def test_false(text: str) -> None:
    assert not read_env({"HF_HUB_OFFLINE": text}).hf_offline


@pytest.mark.parametrize("text", ["2", "maybe", "tru", " 1"])
def test_neither(text: str) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is"):
        read_env({"HF_HUB_OFFLINE": text})
