"""Tokenizers that are wrong, and texts that are: one error that names the file, whatever the library does with it."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.checkpoint.gguf.sentencepiece_model import VocabularyPiece, encode_model
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.errors import CheckpointError, RequestError
from tests.support.vocabularies import KINDS, save_byte_level


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\ud83d"])
def test_lone_surrogates_are_the_callers_mistake(folder: Callable[[str], Path], kind: str, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        open_tokenizer(folder(kind)).encode(text)


def broken(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("other.txt", "", ["no tokenizer", "tokenizer.json"]),
        ("tokenizer.json", "", ["tokenizer.json", "cannot be read"]),
        ("tokenizer.json", '{"version": "1.0"}', ["tokenizer.json", "cannot be read"]),
        ("tokenizer.model", "not a model", ["tokenizer.model", "cannot be read"]),
        ("tokenizer.model", "", ["tokenizer.model", "cannot be read"]),
        ("tokenizer_config.json", "{", ["tokenizer_config.json", "not JSON"]),
        ("tokenizer_config.json", "[]", ["tokenizer_config.json", "object"]),
        ("tokenizer_config.json", '{"bos_token": 3}', ["bos_token", "3"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "a"}}', ["added_tokens_decoder"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"%s": "a"}}' % ("9" * 5000), ["added_tokens_decoder"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"2147483648": "a"}}', ["added_tokens_decoder"]),
        ("tokenizer_config.json", r'{"bos_token": "\ud800"}', ["tokenizer_config.json", "surrogates not allowed"]),
        ("tokenizer_config.json", r'{"a": [{"\uDFFF": 1}]}', ["tokenizer_config.json", "surrogates not allowed"]),
        ("tokenizer_config.json", '{"x": ' + "[" * 100_000, ["tokenizer_config.json", "not JSON"]),
        ("tokenizer_config.json", '{"x": %s}' % ("9" * 5000), ["tokenizer_config.json", "not JSON"]),
        ("added_tokens.json", '{"<a>": -1}', ["added_tokens.json", "'<a>' is -1"]),
        ("added_tokens.json", '{"<a>": true}', ["added_tokens.json", "'<a>' is True"]),
        ("added_tokens.json", '{"<a>": [[]]}', ["added_tokens.json", "'<a>' is [[]]"]),
    ],
)
def test_broken_tokenizers(tmp_path: Path, name: str, content: str, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_tokenizer(broken(tmp_path, name, content))
    for word in words:
        assert word in str(caught.value)


def test_tokens_and_decoders_that_do_not_fit(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    broken(tmp_path, "tokenizer_config.json", json.dumps({**config, "bos_token": "<nowhere>"}))
    with pytest.raises(CheckpointError, match="<nowhere>"):
        open_tokenizer(tmp_path)
    broken(tmp_path, "tokenizer_config.json", json.dumps(config))
    for decoder in (None, {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}):
        broken(tmp_path, "tokenizer.json", json.dumps({**raw, "decoder": decoder}))
        with pytest.raises(CheckpointError, match="decoder"):
            open_tokenizer(tmp_path)


KEYS = "bos_token eos_token pad_token additional_special_tokens extra_special_tokens added_tokens_decoder add_bos_token"


@pytest.mark.parametrize("key", [*KEYS.split(" "), "legacy", "split_special_tokens", "chat_template"])
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_no_value_of_any_key_ends_in_another_error(
    folder: Callable[[str], Path], tmp_path: Path, kind: str, key: str
) -> None:
    shutil.copytree(folder(kind), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for value in (
        None,
        True,
        3,
        "x",
        "",
        [],
        {},
        [3],
        ["<s>"],
        {"a": 1},
        {"7": {"content": "x"}},
        {"9": {"content": 1}},
    ):
        path.write_text(json.dumps({**config, key: value}))
        try:
            tokenizer = open_tokenizer(tmp_path)
        except CheckpointError as error:
            assert "tokenizer" in error.what, (key, value)
        else:
            assert "mill" in tokenizer.decode(tokenizer.encode("the mill"))


def with_charsmap(folder: Path, charsmap: object, nested: bool = False) -> Path:
    """A tokenizer that is whole but for its normalizer."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    whole: dict[str, object] = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": None, "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": [normalizer]} if nested else normalizer,
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False},
    }  # fmt: skip
    return broken(folder, "tokenizer.json", json.dumps(whole))


def table(*units: int, size: int | None = None) -> str:
    data = b"".join(unit.to_bytes(4, "little") for unit in units)
    return base64.b64encode((len(data) if size is None else size).to_bytes(4, "little") + data + b"x\0").decode()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [7, 8, 2**31, 2**32 - 4, 2**32 - 1])
def test_a_normalizer_larger_than_its_file_is_refused_before_the_library_allocates_it(
    tmp_path: Path, size: int, nested: bool
) -> None:
    with pytest.raises(CheckpointError, match=f"precompiled_charsmap of 10 bytes has a table of {size}"):
        open_tokenizer(with_charsmap(tmp_path, table(1, size=size), nested))


@pytest.mark.parametrize("charsmap", ["", "AA==", "!", "x", 5, None])
def test_a_normalizer_that_panics_when_it_is_read(tmp_path: Path, charsmap: object) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(with_charsmap(tmp_path, charsmap))


def test_a_normalizer_that_panics_when_it_is_used(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(with_charsmap(tmp_path, table(0x7FFFFC00)))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: index out of bounds"):
        tokenizer.encode("a")


def test_a_sentencepiece_model_with_a_token_that_is_no_text(tmp_path: Path) -> None:
    pieces = [
        VocabularyPiece("<unk>", 0, 2),
        VocabularyPiece("<s>", 0, 3),
        VocabularyPiece("</s>", 0, 3),
        VocabularyPiece("mill", 0, 1),
    ]
    data = encode_model(pieces, byte_fallback=False, prefix=True)
    (tmp_path / "tokenizer.model").write_bytes(data)
    assert open_tokenizer(tmp_path).token_bytes(3) == b"mill"
    (tmp_path / "tokenizer.model").write_bytes(data.replace(b"mill", b"m\xfall"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be read: token 3 is not UTF-8"):
        open_tokenizer(tmp_path)


def test_a_vocabulary_without_its_own_unknown_token(tmp_path: Path) -> None:
    """The library reads it, and fails at the first character that it does not know."""
    from tokenizers import Tokenizer as Library
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    library = Library(BPE(vocab={"a": 0}, merges=[], unk_token="<unk>"))
    library.decoder = ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("aa") == [0, 0]
    with pytest.raises(CheckpointError, match="`<unk>` not found"):
        tokenizer.encode("b")


def test_a_bpe_with_a_prefix_of_subwords_is_refused(tmp_path: Path) -> None:
    """With some merges it ends the process: the library cuts behind so many bytes, in the middle of a character too."""
    from tokenizers import Tokenizer as Library
    from tokenizers.models import BPE

    model = BPE(vocab={"a": 0, "##b": 1, "ab": 2}, merges=[("a", "##b")], continuing_subword_prefix="##")
    Library(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="continuing_subword_prefix"):
        open_tokenizer(tmp_path)
