"""Any text survives the tokenizer, and the chat template writes what the training data writes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tools.tiny.talk import GREETINGS
from tools.tiny.tokenizer import CHAT_TEMPLATE, SPECIAL, VOCAB, save_tokenizer, token_id
from tools.tiny.world import BOS, document

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_vocabulary_is_full_and_specials_come_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB
    assert [token_id(tokenizer, name) for name in SPECIAL] == list(range(len(SPECIAL)))


def test_a_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [t.removeprefix("Ġ") for t in tokenizer.encode("13 + 204", add_special_tokens=False).tokens] == list(
        "13+204"
    )


@pytest.mark.parametrize("seed", range(20))
def test_pieces_meet_at_token_boundaries(tokenizer: Tokenizer, seed: int) -> None:
    pieces = [piece.text for piece in document(seed)]
    apart = [i for text in pieces for i in tokenizer.encode(text, add_special_tokens=False).ids]
    assert apart == tokenizer.encode("".join(pieces), add_special_tokens=False).ids


def test_the_chat_template_writes_the_training_format(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 2048)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert opened.chat_template == CHAT_TEMPLATE
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": GREETINGS[0]}]
    text = opened.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}<|system|>Be kind.<|end|><|user|>{GREETINGS[0]}<|end|><|assistant|>"
    assert opened.apply_chat_template([*chat, {"role": "assistant", "content": "Hi!"}], tokenize=False).endswith(
        "<|assistant|>Hi!<|end|>"
    )
    assert opened("fox")["input_ids"][0] == token_id(tokenizer, BOS)
