"""Tokenizers of all kinds against transformers and sentencepiece, and the incremental detokenizer against `decode`."""

import base64
import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from millrace.checkpoint.gguf.sentencepiece_model import Piece, encode_model
from millrace.checkpoint.tokenizer import Detokenizer, Tokenizer, open_tokenizer
from millrace.errors import CheckpointError, RequestError
from tests.support.shared import shared
from tests.support.vocabularies import save_byte_fallback, save_byte_level, save_sentencepiece, strange_text

KINDS: dict[str, Callable[[Path], None]] = {
    "byte level": save_byte_level,
    "byte fallback": save_byte_fallback,
    "byte fallback, no space": partial(save_byte_fallback, decoder="keep"),
    "metaspace": partial(save_byte_fallback, decoder="metaspace"),
    "sentencepiece": save_sentencepiece,
    "sentencepiece, no space": partial(save_sentencepiece, dummy_prefix=False),
}
JSON_KINDS = [kind for kind in KINDS if not kind.startswith("sentencepiece")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each kind of tokenizer, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("tokenizer")
            KINDS[kind](made[kind])
        return made[kind]

    return make


def reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_encoding_and_decoding_agree_with_transformers(folder: Callable[[str], Path], kind: str) -> None:
    ours, theirs = open_tokenizer(folder(kind)), reference(folder(kind))
    specials = [*theirs.all_special_tokens, "<tool call>", "<think>"]
    for seed in range(60):
        rng = random.Random(seed)
        text = strange_text(rng, rng.randint(0, 40))
        if seed % 3 == 0:
            text += rng.choice(specials) + strange_text(rng, 3) + rng.choice(specials)
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), (seed, text)


def test_random_ids_of_a_byte_level_vocabulary_decode_as_in_transformers(folder: Callable[[str], Path]) -> None:
    """Most of them are not UTF-8."""
    ours, theirs = open_tokenizer(folder("byte level")), reference(folder("byte level"))
    for seed in range(100):
        rng = random.Random(seed)
        ids = [rng.randrange(ours.vocab_size) if rng.random() < 0.3 else rng.randrange(256) for _ in range(40)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece, no space"])
def test_plain_text_agrees_with_sentencepiece(folder: Callable[[str], Path], kind: str) -> None:
    ours = open_tokenizer(folder(kind))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder(kind) / "tokenizer.model"))
    for seed in range(60):
        text = strange_text(random.Random(seed), seed % 40)
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text)
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        assert ours.decode(ids) == theirs.decode(ids) == text


def llama_reference(folder: Path, legacy: bool) -> Any:
    """transformers' LlamaTokenizer of a tokenizer.model, without the protobuf package that its own reader needs."""
    import transformers
    from transformers.convert_slow_tokenizer import generate_merges

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    size = model.get_piece_size()
    vocab = {model.id_to_piece(i): i for i in range(size)}
    scores = {model.id_to_piece(i): model.get_score(i) for i in range(259, size)}  # without specials and bytes
    return transformers.LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores), legacy=legacy)


@pytest.mark.parametrize("legacy", [False, True])
def test_special_tokens_between_sentencepiece_stretches(tmp_path: Path, legacy: bool) -> None:
    save_sentencepiece(tmp_path, legacy=legacy)
    ours, theirs = open_tokenizer(tmp_path), llama_reference(tmp_path, legacy)
    # after a dummy prefix transformers' pre-tokenizer swallows a space of the text's own; sentencepiece keeps it
    spaced = () if legacy else ("a</s>b</s> c", "the <s> mill</s>  c")
    for text in ("<s>[INST] hi [/INST]", "a</s>b</s>c", "</s>", "<s></s>the", "<unk>mill", "the <s", *spaced):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
    ids = ours.encode("<s>[INST] hi [/INST]", add_special_tokens=False)
    assert ids[0] == 1 and not ours.special_ids & set(ids[1:]), "[INST] is ordinary text"
    assert ours.decode(ids) == ("[INST] hi [/INST]")


def test_sentencepiece_with_added_tokens(tmp_path: Path) -> None:
    decoder = {
        "600": {"content": "<|user|>", "special": True, "rstrip": True},
        "601": {"content": "<note>", "lstrip": True},
    }
    save_sentencepiece(tmp_path, add_bos_token=False, add_eos_token=True, added_tokens_decoder=decoder)
    ours = open_tokenizer(tmp_path)
    assert ours.vocab_size == 602 and 600 in ours.special_ids and 601 not in ours.special_ids
    ids = ours.encode("the<|user|> \n mill <note>a")
    plain = ours.encode("the mill", add_special_tokens=False)
    assert ids[-1] == ours.eos_token_id and ids[ids.index(600) - 1] == plain[0] and ids[0] != ours.bos_token_id
    assert ours.decode(ids) == "themill<note>a"
    assert ours.decode(ids, skip_special_tokens=False) == "the<|user|>mill<note>a</s>"


def test_the_real_small_model() -> None:
    path = shared("models/stories260K")
    golden = json.loads((path / "golden.json").read_text())
    ours = open_tokenizer(path)
    assert ours.decode(golden["greedy_from_bos_ids"]) == golden["text"]
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (512, 1, 2)
    assert ours.special_ids == {0, 1, 2} and ours.special_token_strings["bos_token"] == "<s>"
    # what transformers says; the golden ids are the model's own choice, not the tokenizer's
    assert ours.encode(golden["text"]) == reference(path).encode(golden["text"])


def chunks(ids: list[int], rng: random.Random) -> list[list[int]]:
    parts, at = [], 0
    while at < len(ids):
        n = rng.choice([1, 1, 1, 2, 5])
        parts.append(ids[at : at + n])
        at += n
    return parts


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_pushes_add_up_to_decode(folder: Callable[[str], Path], kind: str, skip: bool) -> None:
    tokenizer = open_tokenizer(folder(kind))
    for seed in range(40):
        rng = random.Random(seed)
        text = strange_text(rng, rng.randint(1, 40)).replace("\ufffd", "")
        ids = tokenizer.encode(text, add_special_tokens=rng.random() < 0.5)
        at = rng.randint(0, len(ids))
        for prompt, rest in (([], ids), (ids[:at], ids[at:])):
            detokenizer = Detokenizer(tokenizer, skip, prompt)
            pushed = [detokenizer.push(part) for part in chunks(rest, rng)]
            assert "\ufffd" not in "".join(pushed), "an unfinished character was given out"
            got = "".join(pushed) + detokenizer.flush()
            before = tokenizer.decode(prompt, skip).rstrip("\ufffd")  # where the cut goes through a character
            assert before + got == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_add_up_to_decode(folder: Callable[[str], Path], kind: str) -> None:
    """Random ids: broken characters, special tokens in their midst, ids beyond the vocabulary."""
    tokenizer = open_tokenizer(folder(kind))
    for seed in range(60):
        rng = random.Random(seed)
        ids = [rng.randrange(tokenizer.vocab_size + 3) if rng.random() < 0.4 else rng.randrange(262) for _ in range(50)]
        detokenizer = Detokenizer(tokenizer)
        got = "".join(detokenizer.push(part) for part in chunks(ids, rng)) + detokenizer.flush()
        data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
        assert got == tokenizer.decode(ids)
        assert got.lstrip(" ") == data.decode("utf-8", "replace").lstrip(" ")


def test_a_character_of_four_tokens_comes_out_whole(folder: Callable[[str], Path]) -> None:
    tokenizer = open_tokenizer(folder("byte fallback"))
    ids = [3 + byte for byte in "😀".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
    detokenizer.push(ids[:3])
    assert detokenizer.flush() == "\ufffd"
    split = Detokenizer(tokenizer, prompt=ids[:2])
    assert split.push(ids[2:]) == "😀"


def test_the_leading_space_depends_on_what_came_before(folder: Callable[[str], Path]) -> None:
    tokenizer = open_tokenizer(folder("byte fallback"))
    mill = tokenizer.encode("mill", add_special_tokens=False)
    assert Detokenizer(tokenizer).push(mill) == "mill"
    assert Detokenizer(tokenizer, prompt=[1]).push(mill) == "mill", "<s> is skipped, so this is the start"
    assert Detokenizer(tokenizer, skip_special_tokens=False, prompt=[1]).push(mill) == " mill"
    assert Detokenizer(tokenizer, prompt=tokenizer.encode("the")).push(mill) == " mill"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens(folder: Callable[[str], Path], kind: str) -> None:
    tokenizer = open_tokenizer(folder(kind))
    every = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= every, "every byte has a token"
    assert b" the" in every and not any(b"\xe2\x96\x81" in data for data in every)
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**9) == b""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\ud83d"])
def test_lone_surrogates_are_the_callers_mistake(folder: Callable[[str], Path], kind: str, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        open_tokenizer(folder(kind)).encode(text)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_the_post_processor_decides_about_bos(tmp_path: Path, flags: dict[str, bool]) -> None:
    save_byte_fallback(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **flags}))
    ids = open_tokenizer(tmp_path).encode("the mill")
    assert ids == reference(tmp_path).encode("the mill") and ids[0] == 1


def test_special_tokens_named_outside_tokenizer_json(tmp_path: Path) -> None:
    """tokenizer_config.json calls a token special that tokenizer.json does not; its name may be an object."""
    save_byte_level(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"__type": "AddedToken", "content": "<think>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = open_tokenizer(tmp_path), reference(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id and ours.eos_token_id in ours.special_ids
    ids = ours.encode("a<think>b")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(raw))
    assert len(open_tokenizer(tmp_path).encode("the mill " * 20)) > 4


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
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        broken(tmp_path, "tokenizer.json", json.dumps({**raw, "decoder": decoder}))
        with pytest.raises(CheckpointError, match="decoder"):
            open_tokenizer(tmp_path)


def test_many_ids_in_one_push_are_linear(folder: Callable[[str], Path]) -> None:
    """3.9 million of them came in one request: quadratic copying took minutes, and half a million 20 s."""
    tokenizer = open_tokenizer(folder("byte level"))
    ids = [max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))] * 500_000
    start_s = time.perf_counter()
    text = tokenizer.decode(ids)
    assert time.perf_counter() - start_s < 5
    assert len(text) == 500_000 * len(tokenizer.decode(ids[:1]))


def test_pushing_is_linear(folder: Callable[[str], Path]) -> None:
    """Each token is looked at once: the work per push does not depend on how many came before."""
    looked: list[int] = []
    tokenizer = open_tokenizer(folder("byte level"))

    class Counting(Tokenizer):
        def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
            looked.append(token_id)
            return tokenizer.token_bytes(token_id, first=first)

        def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise NotImplementedError

        _token_bytes = _first_bytes = tokenizer._token_bytes

    detokenizer = Detokenizer(Counting(tokenizer.vocab_size, tokenizer.specials), prompt=list(range(200)) * 50)
    opening = len(looked)
    for _ in range(1000):
        detokenizer.push([70])
    assert opening < 20 and len(looked) - opening <= 2000


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
    pieces = [Piece("<unk>", 0, 2), Piece("<s>", 0, 3), Piece("</s>", 0, 3), Piece("mill", 0, 1)]
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
