"""What `LLM.get_tokenizer()` gives, call by call against transformers' own tokenizer of the same files."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from millrace.checkpoint.checkpoint import open_chat_template
from millrace.checkpoint.hf_tokenizer import HfTokenizer
from millrace.checkpoint.tokenizer import NAMED_TOKENS, open_tokenizer
from millrace.errors import CheckpointError, RequestError
from millrace.runtime.open import BUNDLED
from tests.support.vocabularies import save_byte_fallback, save_byte_level, save_sentencepiece, strange_text

CHAT = [{"role": "user", "content": " Hi <|user|>there "}, {"role": "assistant", "content": "Hello."}]
KINDS: dict[str, Callable[[Path], None] | None] = {
    "tiny": None, "byte level": save_byte_level, "byte fallback": save_byte_fallback
}  # fmt: skip


def ours_of(folder: Path) -> HfTokenizer:
    tokenizer = open_tokenizer(folder)
    return HfTokenizer(tokenizer, open_chat_template(folder, tokenizer))


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HfTokenizer, Any]:
    """Ours and theirs."""
    save, folder = KINDS[request.param], BUNDLED / "tiny"
    if save is not None:
        folder = tmp_path_factory.mktemp("tokenizer")
        save(folder)
    return ours_of(folder), transformers.AutoTokenizer.from_pretrained(folder)


def test_texts_and_ids(both: tuple[HfTokenizer, Any]) -> None:
    ours, theirs = both
    texts = [strange_text(random.Random(seed), 20) for seed in range(20)] + ["", "one", theirs.eos_token + " two"]
    for text in texts:
        for special in (True, False):
            encoding = theirs(text, add_special_tokens=special)
            mine = ours(text, add_special_tokens=special)
            assert mine.input_ids == mine["input_ids"] == encoding.input_ids
            assert mine.attention_mask == encoding.attention_mask
            assert ours.encode(text, add_special_tokens=special) == encoding.input_ids
            assert ours.tokenize(text, add_special_tokens=special) == theirs.tokenize(text, add_special_tokens=special)
        ids = theirs.encode(text)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
            assert ours.convert_ids_to_tokens(ids, skip) == theirs.convert_ids_to_tokens(ids, skip)
        assert ours.decode(np.array(ids)) == ours.decode(ids) and ours.tokenize(text) == theirs.tokenize(text)
    assert ours(texts).input_ids == theirs(texts).input_ids
    assert ours(texts).attention_mask == theirs(texts).attention_mask
    batch = [theirs.encode(text) for text in texts]
    assert ours.batch_decode(batch) == theirs.batch_decode(batch) == ours.decode(batch) == theirs.decode(batch)


def test_the_vocabulary(both: tuple[HfTokenizer, Any]) -> None:
    ours, theirs = both
    assert (len(ours), ours.vocab_size, ours.get_vocab()) == (len(theirs), theirs.vocab_size, theirs.get_vocab())
    assert ours.chat_template == theirs.chat_template
    for name in NAMED_TOKENS:
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    tokens = [*random.Random(0).sample(sorted(theirs.get_vocab()), 50), "no such token"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_tokens_to_ids(tokens[0]) == theirs.convert_tokens_to_ids(tokens[0])
    for i in (0, 7, len(ours) - 1, len(ours), 10**9):
        assert ours.convert_ids_to_tokens(i) == theirs.convert_ids_to_tokens(i)
        assert ours.decode(i) == theirs.decode(i)


def test_conversations(both: tuple[HfTokenizer, Any]) -> None:
    ours, theirs = both
    if theirs.chat_template is None:
        with pytest.raises(CheckpointError, match="no chat template"):
            ours.apply_chat_template(CHAT)
        return
    ways: tuple[dict[str, Any], ...] = (
        {}, {"add_generation_prompt": True}, {"tokenize": False}, {"return_dict": False},
        {"tokenize": False, "add_generation_prompt": True}, {"enable_thinking": False, "tokenize": False},
    )  # fmt: skip
    for options in ways:
        for conversation in (CHAT, CHAT[:1], [CHAT, CHAT[:1]]):
            mine, their = (t.apply_chat_template(conversation, **options) for t in both)
            assert mine == (their if isinstance(their, str | list) else dict(their)), options
    assert ours.apply_chat_template(CHAT).input_ids == theirs.apply_chat_template(CHAT).input_ids


def test_a_sentencepiece_model_is_asked_likewise(tmp_path: Path) -> None:
    import sentencepiece

    save_sentencepiece(tmp_path)
    ours, model = ours_of(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert ours.vocab_size == model.get_piece_size() <= len(ours) == len(ours.get_vocab())
    ids = range(model.get_piece_size())
    tokens = [model.id_to_piece(i) for i in ids]
    assert ours.convert_ids_to_tokens(ids) == tokens and ours.convert_tokens_to_ids(tokens) == list(ids)
    assert ours.tokenize("the miller") == model.encode("the miller", out_type=str)
    assert ours.convert_tokens_to_ids("no such token") == ours.unk_token_id == model.unk_id()


def test_what_is_not_here_says_what_to_use() -> None:
    ours = ours_of(BUNDLED / "tiny")
    with pytest.raises(AttributeError, match=r'did you mean "batch_decode"\?.*AutoTokenizer'):
        ours.batch_decod  # noqa: B018
    with pytest.raises(AttributeError, match=r"save_pretrained.*AutoTokenizer"):
        ours.save_pretrained("x")
    with pytest.raises(AttributeError, match="an encoding has no word_ids; it has input_ids and attention_mask"):
        ours("x").word_ids()
    with pytest.raises(RequestError, match="return_tensors is 'pt'") as error:
        ours("x", return_tensors="pt")
    assert "torch.tensor" in error.value.mend
    with pytest.raises(RequestError, match='did you mean "padding"'):
        ours.encode("x", paddin=True)
    with pytest.raises(RequestError, match="truncation is True"):
        ours.apply_chat_template(CHAT, truncation=True)
    with pytest.raises(RequestError, match="of type list"):
        ours.encode(["x"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="lone surrogate"):
        ours.convert_tokens_to_ids("\ud800")
    assert ours("x", padding=False, truncation=False, return_tensors=None).input_ids == ours.encode("x")
