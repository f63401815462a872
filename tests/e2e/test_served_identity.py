"""What a server says of itself tells two fine-tunes of one shape apart, and two starts of one engine not."""

import shutil
from pathlib import Path
from typing import Any

import httpx

from millrace.compile.resolve_model import BUNDLED
from millrace.engine.artifact.engine import Engine
from tests.e2e.conftest import built
from tests.e2e.live import MODEL, live


def told(engine: Path) -> tuple[str, set[str]]:
    """The engine of /v1/metadata, and what every kind of answer has as its `system_fingerprint`."""
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    with live(engine) as server, server.client() as client:
        metadata = httpx.get(f"{server.url}/v1/metadata").json()
        chat = client.chat.completions.create(model=MODEL, max_tokens=1, messages=messages)
        text = client.completions.create(model=MODEL, max_tokens=1, prompt="Once")
        stream = client.chat.completions.create(model=MODEL, max_tokens=1, messages=messages, stream=True)
        said = {str(answer.system_fingerprint) for answer in (chat, text, *stream)}
    assert metadata["selectedModelProfileId"] == metadata["millrace"]["engine"] == Engine.open(engine).manifest.identity
    return metadata["selectedModelProfileId"], said


def test_two_fine_tunes_of_one_shape_are_two_models(tiny_engine: Path, tmp_path: Path) -> None:
    first, (fingerprint,) = told(tiny_engine)
    assert told(tiny_engine) == (first, {fingerprint})
    tuned = Path(shutil.copytree(BUNDLED / "tiny", tmp_path / "tiny"))
    data = bytearray((tuned / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 0x40  # half of a weight: less would be lost in 4 bits, and the engine be the same
    (tuned / "model.safetensors").write_bytes(data)
    second, (other,) = told(built(tuned, tmp_path / "engine", "w4a8"))
    assert second != first and other != fingerprint
