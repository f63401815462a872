"""What a server says of its engine, in /v1/metadata and in `system_fingerprint`, depends on the weights."""

import shutil
from pathlib import Path
from typing import Any, cast

from millrace.cli.serve.run import _text_model
from millrace.compile.builder import build_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.runtime.open_engine import open_engine
from millrace.runtime.settings import RunSettings


def identity(checkpoint: Path, folder: Path) -> str:
    opened = open_engine(
        "tiny", build_engine("tiny", checkpoint, folder, BuildSettings(max_context=64, tune=0)), RunSettings()
    )
    try:
        return str(_text_model(opened, cast(Any, None), ()).metadata["engine"])
    finally:
        opened.close()


def test_two_fine_tunes_of_one_shape_are_two_engines(tmp_path: Path) -> None:
    first = identity(BUNDLED / "tiny", tmp_path / "1")
    tuned = Path(shutil.copytree(BUNDLED / "tiny", tmp_path / "tuned"))
    assert identity(tuned, tmp_path / "2") == first
    data = bytearray((tuned / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (tuned / "model.safetensors").write_bytes(data)
    assert identity(tuned, tmp_path / "3") != first
