"""What `LLM.get_tokenizer()` gives, call by call against transformers' own tokenizer of the same files."""

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from millrace.api.hf_tokenizer import HfTokenizer
from millrace.checkpoint.checkpoint import open_chat_template
from millrace.checkpoint.tokenizer.tokenizer import NAMED_TOKENS
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import CheckpointError, ConfigError, RequestError
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
    assert "torch.tensor" in error.value.fix
    with pytest.raises(RequestError, match='did you mean "padding"'):
        ours.encode("x", paddin=True)
    with pytest.raises(RequestError, match="truncation is True"):
        ours.apply_chat_template(CHAT, truncation=True)
    with pytest.raises(RequestError, match="of type list"):
        ours.encode(["x"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="lone surrogate"):
        ours.convert_tokens_to_ids("\ud800")
    assert ours("x", padding=False, truncation=False, return_tensors=None).input_ids == ours.encode("x")


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ("abc", "ids are of type str"), (b"abc", "ids are of type bytes"), (None, "ids are of type NoneType"),
        ([1.5], "a token id is 1.5"), ([True], "a token id is True"), (-1, "a token id is -1"),
        ([2, -1], "a token id is -1"), ({"input_ids": [1]}, "ids are of type dict"), ([1, [2]], "ids and lists of ids"),
        ([[[1]]], "ids are of type list"), (np.array([1.0]), "a token id is 1.0"), (["5"], "ids are of type str"),
    ],
)  # fmt: skip
def test_what_is_no_id_is_refused(ids: Any, what: str) -> None:
    ours = ours_of(BUNDLED / "tiny")
    for call in (ours.decode, ours.batch_decode):
        with pytest.raises(RequestError, match=what) as error:
            call(ids)
        assert "input_ids" in error.value.fix or "each" in error.value.fix
    with pytest.raises(RequestError):
        ours.convert_ids_to_tokens(ids)


def test_ids_in_any_container(both: tuple[HfTokenizer, Any]) -> None:
    ours, theirs = both
    for ids in ([5, 6], (5, 6), np.array([5, 6]), [np.int64(5), 6], ([5], [6]), [[5, 6], []], np.array([[5], [6]])):
        assert ours.decode(ids) == theirs.decode(ids), ids
    assert ours.decode(range(5, 7)) == ours.decode([5, 6]) and ours.decode([]) == ""
    for ids in ([5, 6], [[5], [6]], []):
        assert ours.batch_decode(ids) == theirs.batch_decode(ids), ids


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda t: t({"a": 1}), "the text is of type dict"), (lambda t: t(None), "the text is of type NoneType"),
        (lambda t: t(b"ab"), "the text is of type bytes"), (lambda t: t("a", "b"), "text_pair is 'b'"),
        (lambda t: t("a", padding=np.array([1, 2])), "padding is array"), (lambda t: t([None]), "of type NoneType"),
        (lambda t: t.encode("a", "b"), "add_special_tokens is 'b'"), (lambda t: t("a", add_special_tokens=3), "is 3"),
        (lambda t: t.decode([5], "x"), "skip_special_tokens is 'x'"),
        (lambda t: t.convert_tokens_to_ids(None), "a token is of type NoneType"),
        (lambda t: t.convert_tokens_to_ids([3]), "a token is of type int"),
        (lambda t: t.apply_chat_template(CHAT[0]), "a conversation is of type dict"),
        (lambda t: t.apply_chat_template(None), "a conversation is of type NoneType"),
        (lambda t: t.apply_chat_template("Hi"), "a conversation is of type str"),
        (lambda t: t.apply_chat_template([CHAT, CHAT[0]]), "a conversation is of type dict"),
        (lambda t: t.apply_chat_template(["Hi"]), r"messages\[0\] is Hi"),
        (lambda t: t.apply_chat_template([]), "there are no messages"),
        (lambda t: t.apply_chat_template(CHAT, tools=3), "tools is a int"),
        (lambda t: t.apply_chat_template(CHAT, tools={"name": "f"}), "tools is a dict"),
        (lambda t: t.apply_chat_template(CHAT, tools=[print]), "tools has a builtin_function_or_method"),
        (lambda t: t.apply_chat_template(CHAT, messages=CHAT), "messages are given twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(call: Callable[[HfTokenizer], object], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        call(ours_of(BUNDLED / "tiny"))


def test_a_tokenizer_is_copied_and_says_why_it_is_not_pickled() -> None:
    ours = ours_of(BUNDLED / "tiny")
    for again in (copy.copy(ours), copy.deepcopy(ours), copy.deepcopy({"a": ours})["a"]):
        assert again.encode("Once") == ours.encode("Once")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ConfigError, match="cannot be pickled") as error:
            pickle.dumps(ours, protocol)
    assert "send the name" in error.value.fix and "AutoTokenizer" in error.value.fix


def test_a_name_of_a_megabyte_is_not_repeated() -> None:
    with pytest.raises(AttributeError, match="this tokenizer has no xxx") as error:
        getattr(ours_of(BUNDLED / "tiny"), "x" * 2**20)
    assert len(str(error.value)) < 3000
