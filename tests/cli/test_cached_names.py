"""What `list` shows is a MODEL; a checkpoint's path leads `inspect` and `tune` to the engine that was built from it."""

import json
import shutil
from pathlib import Path

import pytest

from millrace import LLM, SamplingParams
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import ConfigError
from tests.cli.conftest import Millrace

ASK = ("Once", "--max-tokens", "2", "--seed", "3")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED / "tiny", tmp_path / "my model"))


def test_the_name_that_list_shows_is_a_model(millrace: Millrace, checkpoint: Path) -> None:
    millrace("generate", "my-model", *ASK).assert_mistake('no model "my-model"')
    first = millrace("generate", checkpoint, *ASK, "--tune", "0", "--no-evaluate", "--precision", "w8a8")
    (entry,) = json.loads(millrace("list", "--json").out)
    shutil.rmtree(checkpoint)
    for name in (entry["model"], entry["name"]):
        assert millrace("generate", name, *ASK).out == first.out, "without the checkpoint"
    with LLM(entry["model"]) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=2, seed=3))[0].finished
    millrace("generate", "my-modle", *ASK).assert_mistake('did you mean "my-model"?')
    millrace("generate", "my-model", *ASK, "--precision", "fp32").assert_mistake(
        "--precision is given", "already built"
    )


def test_a_name_of_several_engines_is_said_with_their_folders(millrace: Millrace, checkpoint: Path) -> None:
    for precision in ("w8a8", "bf16"):
        assert (
            millrace("generate", checkpoint, *ASK, "--tune", "0", "--no-evaluate", "--precision", precision).code == 0
        )
    entries = json.loads(millrace("list", "--json").out)
    folders = [e["folder"] for e in entries]
    millrace("generate", "my-model", *ASK).assert_mistake('2 engines of "my-model"', *folders)
    assert millrace("generate", folders[0], *ASK).code == 0
    with pytest.raises(ConfigError, match="2 engines"):
        LLM("my-model")


def test_inspect_and_tune_take_the_checkpoint_that_was_served(millrace: Millrace, checkpoint: Path) -> None:
    millrace("inspect", checkpoint).assert_mistake("the cache has no engine of", "millrace build")
    other = Path(shutil.copytree(checkpoint, checkpoint.parent / "other" / checkpoint.name))
    (other / "generation_config.json").write_text("{}")  # another content, of the same name
    for folder, precision in ((checkpoint, "w8a8"), (other, "w4a8")):
        assert millrace("generate", folder, *ASK, "--tune", "0", "--no-evaluate", "--precision", precision).code == 0
    (w8a8,) = (e for e in json.loads(millrace("list", "--json").out) if e["precision"] == "w8a8")
    assert w8a8["folder"] in millrace("inspect", checkpoint).out
    assert w8a8["folder"] not in millrace("inspect", other).out
    assert w8a8["folder"] in millrace("tune", checkpoint, "--seconds", "60").out
