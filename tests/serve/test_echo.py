"""Where an echoed prompt's tokens begin in the text that is given back, for prompts as texts and as token ids."""

import random
from pathlib import Path

import pytest

from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.runtime.request.sampling_params import TokenLogprobs
from millrace.serve.llm.logprobs import Echo, OffsetLogprobs
from tests.serve.support import Fake, post, running
from tests.support.vocabularies import WORDS, save_byte_fallback, save_byte_level, save_sentencepiece, save_word_pieces

SAVED = {
    "byte level": (save_byte_level, "<|im_end|>"),
    "byte fallback": (save_byte_fallback, "</s>"),
    "sentencepiece": (save_sentencepiece, "</s>"),
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_text_shows_the_special_tokens_that_it_was_sent_with(tmp_path: Path, kind: str) -> None:
    """And not those that the tokenizer put around it."""
    save, special = SAVED[kind]
    save(tmp_path)
    tokenizer, rng = open_tokenizer(tmp_path), random.Random(7)
    for _ in range(30):
        text = special.join(" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 4)))
        for add in (False, True):
            ids = tokenizer.encode(text, add)
            around = tokenizer.special_around if add else (0, 0)
            echo = Echo.of_text(tokenizer, text, ids, around)
            assert echo.text == text and len(echo.offsets) == len(ids) and not any(echo.offsets[: around[0] + 1])
            starts = [i for i, token_id in enumerate(ids) if tokenizer.token_text(token_id) == special]
            assert len(starts) == text.count(special)
            assert all(text[echo.offsets[i] :].startswith(special) for i in starts)
            assert [*echo.offsets] == sorted(echo.offsets) and echo.offsets[-1] < len(text)


def test_those_around_a_text_take_no_room(tmp_path: Path) -> None:
    save_word_pieces(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    ids = tokenizer.encode("the mill")
    echo = Echo.of_text(tokenizer, "the mill", ids, tokenizer.special_around)
    assert tokenizer.special_around == (1, 1) and echo.offsets[:2] == [0, 0]
    assert echo.offsets[-1] == len("the mill")


@pytest.mark.parametrize("skip", [True, False])
def test_token_ids_show_them_as_decoding_does(tmp_path: Path, skip: bool) -> None:
    save_byte_level(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    ids = tokenizer.encode("the<|im_end|> mill")
    echo = Echo.of_ids(tokenizer, ids, skip)
    assert echo.text == tokenizer.decode(ids, skip) == ("the mill" if skip else "the<|im_end|> mill")
    assert [len(tokenizer.decode(ids[:i], skip)) for i in range(len(ids))] == [*echo.offsets]


def test_an_answer_goes_on_where_the_text_ends(tmp_path: Path) -> None:
    """However the prompt's own offsets were counted: a normaliser may have made another text of it."""
    save_byte_level(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    text = "a<|im_end|>b"
    ids, answer = tokenizer.encode(text), tokenizer.encode(" mill")
    offsets = OffsetLogprobs(tokenizer, ids, True, Echo.of_text(tokenizer, text, ids, (0, 0)))
    told = [offsets.first(ids[0], False).text_offset]
    told += [
        offsets.take([TokenLogprobs(i, -1.0, 1, ()) for i in part], False).text_offset for part in (ids[1:], answer)
    ]
    assert told[0] + told[1] == [0, 1, 11] and told[2][0] == len(text)


def test_a_server_says_so() -> None:
    text = "the<|im_end|> mill<|im_start|>a"
    with running(Fake()) as server:
        body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = post(server.url, "/v1/completions", body).json()["choices"][0]
    told = choice["logprobs"]
    assert choice["text"] == text == "".join(told["tokens"])
    assert all(text[at:].startswith(name) for at, name in zip(told["text_offset"], told["tokens"], strict=True))
