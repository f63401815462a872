"""Tokenizers of all kinds against transformers and sentencepiece."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from tests.support.shared import shared
from tests.support.vocabularies import (
    KINDS,
    OF_DECODERS,
    save_byte_fallback,
    save_byte_level,
    save_sentencepiece,
    strange_text,
)

JSON_KINDS = [kind for kind in KINDS if not kind.startswith("sentencepiece")]


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


@pytest.mark.parametrize("kind", OF_DECODERS)
def test_bytes_of_tokens(folder: Callable[[str], Path], kind: str) -> None:
    tokenizer = open_tokenizer(folder(kind))
    every = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= every, "every byte has a token"
    assert b" the" in every and not any(b"\xe2\x96\x81" in data for data in every)
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**9) == b""


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
