"""Ids beyond the model, ids with gaps between them, and very many of them."""

import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.api.hf_tokenizer import HfTokenizer
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.tokenizer.tokenizer import ADDED_TOKENS, TOKENIZER_CONFIG, TOKENIZER_JSON
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.source import Source
from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.manifest import MANIFEST, FileEntry, file_checksum, read_manifest, sealed
from millrace.errors import CheckpointError
from millrace.runtime.open_engine import open_engine
from millrace.runtime.request.token_lower_bound import reach
from millrace.runtime.settings import RunSettings
from tests.fuzz.originals import VOCABULARY, write_checkpoint
from tests.support.vocabularies import save_byte_fallback, save_byte_level, save_sentencepiece

FAR = 2**31 - 1


def add(folder: Path, tokens: dict[str, int]) -> Path:
    (folder / ADDED_TOKENS).write_text(json.dumps(tokens))
    return folder


def move(folder: Path, token: str, to: int) -> Path:
    """Another id for a token of tokenizer.json's vocabulary."""
    raw = json.loads((folder / TOKENIZER_JSON).read_bytes())
    assert token in raw["model"]["vocab"]
    raw["model"]["vocab"][token] = to
    (folder / TOKENIZER_JSON).write_text(json.dumps(raw))
    return folder


def far_piece(folder: Path) -> Path:
    save_sentencepiece(folder, 600)
    return add(folder, {"<zz>": FAR})


def far_word(folder: Path) -> Path:
    save_byte_level(folder, 700)
    return move(folder, "mill", FAR)


@pytest.mark.parametrize("make", [far_piece, far_word])
def test_an_id_beyond_the_model_is_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    make(tmp_path)
    for model_vocab_size in (1, 600, 2048, FAR):
        with pytest.raises(CheckpointError, match=f"has the id {FAR}[^$]*ids below {model_vocab_size}"):
            open_tokenizer(tmp_path, model_vocab_size)
    assert open_tokenizer(tmp_path, FAR + 1).vocab_size == FAR + 1


def test_the_vocabulary_of_the_model_may_be_padded_and_its_ids_may_have_gaps(tmp_path: Path) -> None:
    save_sentencepiece(tmp_path, 600)
    assert open_tokenizer(tmp_path, 640).vocab_size == 600
    assert open_tokenizer(add(tmp_path, {"<zz>": 639}), 640).vocab_size == 640
    with pytest.raises(CheckpointError, match="'<zz>' has the id 640"):
        open_tokenizer(add(tmp_path, {"<zz>": 640}), 640)


@pytest.mark.parametrize("save", [save_byte_level, save_byte_fallback, save_sentencepiece])
def test_tokens_that_were_added_behind_the_model_are_taken(save: Callable[..., None], tmp_path: Path) -> None:
    """As in Gemma 3, whose tokenizer has one token more than its model: whoever feeds it to the model is told."""
    save(tmp_path, 600)
    size = open_tokenizer(tmp_path).vocab_size
    tokenizer = open_tokenizer(add(tmp_path, {"<zz>": size}), size)
    assert tokenizer.vocab_size == size + 1 and tokenizer.encode("<zz>")[-1] == size


def test_a_checkpoint_and_an_engine_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    source = Source.from_checkpoint(Checkpoint.open(folder))
    options = BuildOptions(max_batch=2, max_step_tokens=16)
    write_engine(source, plan_engine(source, options), tmp_path / "engine", name="test")
    move(folder, "▁", VOCABULARY + 100)
    with pytest.raises(CheckpointError, match=f"ids below {VOCABULARY}"):
        Source.from_checkpoint(Checkpoint.open(folder))
    engine = tmp_path / "engine"
    manifest = read_manifest(engine)
    path = move(engine, "▁", VOCABULARY + 100) / TOKENIZER_JSON
    files = {**manifest.files, TOKENIZER_JSON: FileEntry(path.stat().st_size, file_checksum(path))}
    (engine / MANIFEST).write_bytes(msgspec.json.encode(sealed(msgspec.structs.replace(manifest, files=files))))
    with pytest.raises(CheckpointError, match=f"ids below {VOCABULARY}"):
        open_engine("test", Engine.open(engine), RunSettings(kv_memory=1 << 20))


@pytest.mark.parametrize("make", [far_piece, far_word])
def test_only_ids_that_exist_are_looked_at(make: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = open_tokenizer(make(tmp_path))
    assert sum(1 for _ in islice(tokenizer.ids(), 10_000)) == tokenizer.n_tokens < 1000
    assert (most := reach(tokenizer)) is not None and most.n_bytes == max(
        len(tokenizer.token_bytes(i)) for i in tokenizer.ids()
    )
    assert len(HfTokenizer(tokenizer, None).get_vocab()) == tokenizer.n_tokens
    held = len(tokenizer._bytes)
    for i in range(100_000, 110_000):
        assert tokenizer.token_bytes(i) == b""
    assert len(tokenizer._bytes) == held


def test_16000_added_tokens_are_read_at_once(tmp_path: Path) -> None:
    """Added one by one they took a minute."""
    save_byte_level(tmp_path, 700)
    plain = open_tokenizer(tmp_path)
    config = json.loads((tmp_path / TOKENIZER_CONFIG).read_text())
    first = plain.vocab_size
    config["added_tokens_decoder"] = {str(first + i): {"content": f"<x{i}>", "special": i % 2} for i in range(16_000)}
    config["additional_special_tokens"] = [f"<x{i % 100}>" for i in range(16_000)]
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps(config))
    begun_s = time.process_time()
    tokenizer = open_tokenizer(tmp_path)
    assert time.process_time() - begun_s < 5
    assert (tokenizer.vocab_size, tokenizer.n_tokens) == (first + 16_000, plain.n_tokens + 16_000)
    special = {i for i in range(16_000) if i % 2 or i < 100}
    assert tokenizer.special_ids == plain.special_ids | {first + i for i in special}
    ids = np.array([tokenizer.token_id(f"<x{i}>") for i in range(16_000)])
    assert (ids == first + np.arange(16_000)).all()


@pytest.mark.parametrize(
    "added, found",
    [
        ({"<a>": 0, "<b>": 1, "<c>": 2}, {"<a>": 0, "<b>": 1, "<c>": 2}),
        (
            {"<a>": 0, "<b>": 2, "<c>": 3},
            {"<a>": 0, "<b>": None, "<c>": None},
        ),  # left out behind a gap
        ({"": 0, "<b>": 1}, {"<b>": None}),  # nothing is no token
        ({"<a>": 0, "mill": 1, "<c>": 1}, {"<a>": 0, "<c>": 1}),
    ],
)
def test_added_ids_follow_on(added: dict[str, int], found: dict[str, int | None], tmp_path: Path) -> None:
    save_byte_level(tmp_path, 700)
    first = open_tokenizer(tmp_path).vocab_size
    tokenizer = open_tokenizer(add(tmp_path, {token: first + i for token, i in added.items()}))
    for token, i in found.items():
        assert tokenizer.token_id(token) == (None if i is None else first + i)
