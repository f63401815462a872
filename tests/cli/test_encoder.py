"""An encoder wherever MODEL is accepted: built, shown, listed, served; what it cannot do is one clear error."""

import json
import os
import re
import signal
import threading
from pathlib import Path

import httpx
import pytest

from millrace.serve.server import serve
from tests.cli.conftest import Millrace
from tests.support.checkpoints import random_encoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_encoder(tmp_path_factory.mktemp("models") / "mill-encoder", pooling=None)


def test_build_and_inspect(millrace: Millrace, model: Path, tmp_path: Path) -> None:
    built = millrace("build", model, "-o", tmp_path / "e.engine", "--precision", "bf16", "--tune", "0.1")
    assert built.code == 0 and "KV cache     none" in built.out and "no modules.json" in " ".join(built.out.split())
    shown = millrace("inspect", tmp_path / "e.engine")
    told = " ".join(shown.out.split())
    assert "BertModel" in told and "vocabulary 403" in told
    assert "130 tokens a sequence, 64 sequences, 512 a step" in told
    assert "keys and values written for this step" in told and "bias, 0.5 * x * (1 + erf(0.7071 * x)) in the" in told
    assert "encoder.layer.0 to 1 " in shown.out, "equal layers are one row"
    for text in (told, millrace("inspect", tmp_path / "e.engine", "--calls").out):
        assert not re.search(r"\brope\b|rotated|pages|KV write", text)
    said = json.loads(millrace("inspect", tmp_path / "e.engine", "--json").out)
    assert said["memory"]["kv_bytes_per_token"] == 0 and said["precision"] == {"default": "bf16"}
    for part in ("--calls", "--weights", "--memory", "--tactics", "--graph"):
        assert millrace("inspect", tmp_path / "e.engine", part).code == 0
    assert millrace("tune", tmp_path / "e.engine", "--seconds", "2").code == 0


def test_what_it_cannot_do(millrace: Millrace, model: Path, tmp_path: Path) -> None:
    for command in (("generate", model, "hello"), ("chat", model)):
        millrace(*command, "--tune", "0").assert_mistake("is an encoder", "generates text", "embeddings")
    (listed,) = json.loads(millrace("list", "--json").out)
    assert (listed["model"], listed["precision"], listed["kv"]) == ("mill-encoder", "fp32", "none")
    for options, says in (
        (("--precision", "w4a8"), "not measured for encoders"), (("--head", "bf16"), "--head"),
        (("--kv-cache-dtype", "int8"), "--kv-cache-dtype"), (("--max-context", "131"), "1 to 130"),
        (("--tune-rows", "1/64"), "--tune-rows"), (("--traffic", tmp_path), "--traffic is given for an encoder"),
    ):  # fmt: skip
        millrace("build", model, "-o", tmp_path / "never", *options).assert_mistake(says)
    millrace("serve", model, "--tune", "0", "--kv-memory", "1G", "--port", "0").assert_mistake("--kv-memory")
    millrace("serve", model, "--tune", "0", "--kv-tier", "kv", "--port", "0").assert_mistake(
        "--kv-tier is given for an"
    )


def test_serve(millrace: Millrace, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[httpx.Response] = []

    def asked(models: object, settings: object, ready: object, last: bool) -> None:
        def then(url: str) -> None:
            def ask() -> None:
                body = {"input": "the mill", "model": "mine"}
                try:
                    replies.append(httpx.post(url + "/v1/embeddings", json=body, timeout=60))
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)

            threading.Thread(target=ask).start()

        serve(models, settings, then, last=last)  # type: ignore[arg-type]

    monkeypatch.setattr("millrace.cli.serve.run.serve", asked)
    told = millrace("serve", model, "--tune", "0", "--port", "0", "--served-model-name", "mine")
    assert told.code == 0 and "130 tokens a sequence, 64 sequences" in told.err and "KV" not in told.err
    (reply,) = replies
    assert reply.status_code == 200 and len(reply.json()["data"][0]["embedding"]) == 96
