"""Tokenizers out of GGUF files give the tokens of the originals."""

import json
import random
import shutil
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
from gguf import TokenType

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.gguf.metadata_keys import MetadataKeys
from millrace.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from millrace.checkpoint.gguf.vocabulary import read_specials, tokenizer_files
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import make_tokenizer, open_tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import CheckpointError
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import Edit, add_tokenizer, write_gguf
from tests.support.shared import shared
from tests.support.vocabularies import save_byte_level, save_sentencepiece, strange_text

STORIES = (
    "Once upon a time, there was a little girl named Lily.", " two  spaces ", "don't WE'LL I'm", "1234567 3.14 1,000",
    "line\nbreaks\r\n\n\tand tabs   \n", "", " ", "naïve café 東京 привет 😀", "x</s>y<s> z", "é e\u0301", "a" * 300,
)  # fmt: skip


def texts() -> list[str]:
    rng = random.Random(0)
    return [*STORIES, *(strange_text(rng, rng.randint(0, 30)) for _ in range(150))]


def assert_alike(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in texts():
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
        assert ours.decode(ids) == theirs.decode(ids), text
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids == theirs.special_ids


def of(folder: Path, out: Path, fill: Edit | None = None, family: str = "llama") -> Checkpoint:
    """A model whose tokenizer is the one in `folder`, or what `fill` writes."""
    vocab_size = 2100
    model = random_checkpoint(out / "model", family, vocab_size=vocab_size, num_hidden_layers=1)
    path = write_gguf(out / "m.gguf", model, tokenizer=fill or (lambda w: add_tokenizer(w, folder)))
    return Checkpoint.open(path)


def test_the_bundled_models_own_tokenizer(tmp_path: Path) -> None:
    """It cuts words in a way of its own, which has no name among GGUF's: its tokenizer.json travels along."""
    tiny = BUNDLED / "tiny"

    def fill(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, tiny, pre="tiny")
        writer.add_string("tokenizer.huggingface.json", (tiny / "tokenizer.json").read_text())

    opened = of(tiny, tmp_path, fill)
    assert_alike(opened.tokenizer, open_tokenizer(tiny))
    ours, theirs = opened.chat_template, Checkpoint.open(tiny).chat_template
    assert ours and theirs and opened.eos_token_ids == (6,)
    messages = [{"role": "user", "content": "Tell me a story."}]
    assert ours.render(messages) == theirs.render(messages)
    ours.close()
    theirs.close()


# as tokenizer.json of the original models has them
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> list[tokenizers.pre_tokenizers.PreTokenizer]:
    make = tokenizers.pre_tokenizers
    return [make.Split(tokenizers.Regex(pattern), "isolated"), make.ByteLevel(add_prefix_space=False, use_regex=False)]


PRE: dict[str, tuple[list[tokenizers.pre_tokenizers.PreTokenizer], bool, bool]] = {
    # pre-tokenizers, NFC, whole words
    "gpt-2": ([tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)], False, False),
    "llama-bpe": (split(LLAMA3), False, True),
    "qwen2": (split(LLAMA3.replace("{1,3}", "")), True, False),
    "tekken": (split(TEKKEN), False, True),
    "glm4": (split(LLAMA3), False, True),
    "gpt-4o": (split(GPT4O), False, False),
    "command-r": (
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)],
        True,
        False,
    ),
    "smollm": (
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)],
        False,
        False,
    ),
}


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("vocabulary", ["tiny", "trained"])
def test_byte_level_kinds(tmp_path: Path, pre: str, vocabulary: str) -> None:
    """tiny's vocabulary and a trained one, with the words of well-known models."""
    folder = tmp_path / "folder"
    if vocabulary == "tiny":
        shutil.copytree(BUNDLED / "tiny", folder)
    else:
        save_byte_level(folder)
    cut, nfc, whole_words = PRE[pre]
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(cut)
    library.normalizer = tokenizers.normalizers.NFC() if nfc else None
    raw = json.loads(library.to_str())
    raw["model"]["ignore_merges"] = whole_words
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert_alike(of(folder, tmp_path, lambda w: add_tokenizer(w, folder, pre)).tokenizer, open_tokenizer(folder))


def test_a_real_sentencepiece_vocabulary(tmp_path: Path) -> None:
    folder = shared("models/stories260K")
    assert_alike(of(folder, tmp_path).tokenizer, open_tokenizer(folder))


@pytest.mark.parametrize("prefix", [True, False])
def test_a_trained_sentencepiece_model(tmp_path: Path, prefix: bool) -> None:
    folder = tmp_path / "folder"
    save_sentencepiece(folder, dummy_prefix=prefix, legacy=True)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))

    def fill(writer: gguf.GGUFWriter) -> None:
        size = model.get_piece_size()
        kinds = (
            (model.is_unknown, TokenType.UNKNOWN),
            (model.is_control, TokenType.CONTROL),
            (model.is_byte, TokenType.BYTE),
        )
        types = [next((kind for test, kind in kinds if test(i)), TokenType.NORMAL) for i in range(size)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([model.id_to_piece(i) for i in range(size)])
        writer.add_token_scores([model.get_score(i) for i in range(size)])
        writer.add_token_types(types)
        writer.add_add_space_prefix(prefix)

    ours, theirs = of(folder, tmp_path, fill, family="gemma").tokenizer, open_tokenizer(folder)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen2"])
@pytest.mark.filterwarnings("default")  # of llama-cpp-python, while it loads
def test_llama_cpp_gives_the_same_tokens(tmp_path: Path, family: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = write_gguf(tmp_path / "m.gguf", random_checkpoint(tmp_path / "folder", family))
    model = llama_cpp.Llama(str(path), verbose=False, vocab_only=True)
    ours = Checkpoint.open(path).tokenizer
    for text in ("<s>hi", "x<|im_end|>y <think> z<tool call>", *filter(None, texts())):
        if "\u0301" not in text:  # llama.cpp does not compose characters, as Qwen's own tokenizer does
            ids = model.tokenize(text.encode(), add_bos=False, special=True)
            assert ours.encode(text, add_special_tokens=False) == ids, text
    model.close()


@pytest.mark.nightly
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.filterwarnings("default")  # of llama-cpp-python, while it loads
def test_every_pre_tokenizer_is_llama_cpps(tmp_path: Path, pre: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    folder = random_checkpoint(tmp_path / "folder", "qwen2", vocab_size=2048)
    path = write_gguf(tmp_path / "m.gguf", folder, tokenizer=lambda w: add_tokenizer(w, BUNDLED / "tiny", pre))
    model = llama_cpp.Llama(str(path), verbose=False, vocab_only=True)
    tokenizer = Checkpoint.open(path).tokenizer
    for text in filter(None, texts()):
        if unicodedata.is_normalized("NFC", text):  # llama.cpp does not compose characters, as the originals do
            ids = model.tokenize(text.encode(), add_bos=False, special=True)
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    model.close()


def keys(**changes: object) -> MetadataKeys:
    values: dict[str, object] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "<s>", "<|eot_id|>"], "merges": ["a b"],
        "token_type": np.array([1, 1, 1, 3, 3]), "bos_token_id": 3, "eos_token_id": 3,
    } | changes  # fmt: skip
    return MetadataKeys(Path("m.gguf"), {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None})  # type: ignore[misc]


def tokenizer(**changes: object) -> Tokenizer:
    return make_tokenizer(tokenizer_files(keys(**changes)), Path("m.gguf"))


def test_flags_decide_what_is_put_around_a_text() -> None:
    assert tokenizer().encode("ab") == [2]
    assert tokenizer(add_bos_token=True).encode("ab") == [3, 2]
    assert tokenizer(add_bos_token=True, add_eos_token=True).encode("ab") == [3, 2, 3]
    assert tokenizer(pre="llama-bpe").encode("ab") == [3, 2] and tokenizer(pre="qwen2").encode("ab") == [2]
    assert tokenizer(add_bos_token=True, bos_token_id=None).encode("ab") == [2]


def test_unused_tokens_stand_for_nothing() -> None:
    ours = tokenizer(token_type=np.array([1, 1, 5, 3, 4]), merges=[])
    assert ours.encode("ab<|eot_id|>") == [0, 1, 4] and ours.decode([0, 2, 1, 4, 3]) == "ab<|eot_id|>"


def test_ends_of_a_turn() -> None:
    found = read_specials(keys())
    assert found.eos == (3, 4) and "<|eot_id|>" in found.notes[0]
    assert read_specials(keys(eot_token_id=4)).eos == (3, 4) and read_specials(keys(eot_token_id=4)).notes == ()
    assert read_specials(keys(token_type=np.array([1] * 5))).eos == (3,)
    assert read_specials(keys(eos_token_id=2**32 - 1)).eos == (4,)


SPM: dict[str, object] = {"model": "llama", "scores": np.zeros(5, np.float32), "token_type": np.array([2, 1, 1, 3, 3])}
BROKEN: list[tuple[dict[str, object], str]] = [
    ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
    ({"model": "no_vocab"}, "SentencePiece"),
    ({"pre": None}, "tokenizer.ggml.pre is missing"),
    ({"pre": "qwen3.5"}, "one of gpt-2"),
    ({"tokens": ["a", "a", "ab", "<s>", "x"]}, "each token once"),
    ({"tokens": 3}, "an array of strings"),
    ({"tokens": [], "token_type": np.zeros(0, int), "bos_token_id": None, "eos_token_id": None}, "at least one token"),
    ({**SPM, "scores": np.full(5, 1e300)}, "finite numbers"),
    ({"token_type": np.array([1, 1])}, "an array of 5 integers"),
    ({"token_type": np.array([1, 1, 1, 3, 7])}, "types from 1 to 6"),
    ({"token_type": "1"}, "an array of 5 integers"),
    ({"merges": None}, "tokenizer.ggml.merges is missing"),
    ({"merges": ["ab"]}, "with a space between them"),
    ({"merges": ["a z"]}, "cannot be read"),
    ({"bos_token_id": 5}, "the id of one of 5 tokens"),
    ({"add_bos_token": 1}, "true or false"),
    ({**SPM, "remove_extra_whitespaces": True}, "remove_extra_whitespaces is True"),
    ({**SPM, "scores": None}, "an array of 5 numbers"),
    ({**SPM, "scores": np.full(5, np.nan, np.float32)}, "finite numbers"),
    ({**SPM, "tokens": ["a", "a", "a", "<s>", "x"]}, "cannot be read"),
    ({**SPM, "tokens": ["", "", "ab", "<s>", "x"]}, "cannot be read"),
    ({**SPM, "token_type": np.array([2, 1, 6, 3, 3])}, "cannot be read"),
]


@pytest.mark.parametrize(("changes", "word"), BROKEN)
def test_broken_vocabularies(changes: dict[str, object], word: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tokenizer(**changes)
    assert word in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": {"a": 7}}}', '{"model": {"vocab": {"b": 0}}}'])
def test_an_original_that_is_of_another_model(text: str) -> None:
    values = {**keys().values, "tokenizer.huggingface.json": text}
    with pytest.raises(CheckpointError, match=r"tokenizer\.huggingface\.json"):
        tokenizer_files(MetadataKeys(Path("m.gguf"), values))


def original(**more: object) -> str:
    """The tokenizer.json of `keys()`, which puts <s> before a text."""
    raw = json.loads(tokenizer_files(keys(add_bos_token=True))["tokenizer.json"])
    return json.dumps(raw | more)


def test_the_files_flags_are_above_an_originals_own() -> None:
    def encoded(**flags: bool) -> list[int]:
        values = {**keys(**flags).values, "tokenizer.huggingface.json": original()}
        return make_tokenizer(tokenizer_files(MetadataKeys(Path("m.gguf"), values)), Path("m.gguf")).encode("ab")

    assert encoded() == [3, 2] == encoded(add_bos_token=True)
    assert encoded(add_bos_token=False) == [2] and encoded(add_bos_token=False, add_eos_token=True) == [2, 3]


@pytest.mark.parametrize(
    "more",
    [
        {"added_tokens": [{"id": 5, "content": "x"}]},
        {"added_tokens": [{"id": "5", "content": "x"}]},
        {"post_processor": {"type": "TemplateProcessing", "special_tokens": {"x": {"ids": [2, 999]}}}},
        {"post_processor": {"type": "Sequence", "processors": [{"special_tokens": {"x": {"ids": [-1]}}}]}},
        {"post_processor": {"type": "TemplateProcessing", "special_tokens": {"x": {"ids": 7}}}},
    ],
)
def test_an_original_that_names_ids_that_are_not_there(more: dict[str, object]) -> None:
    values = {**keys().values, "tokenizer.huggingface.json": original(**more)}
    with pytest.raises(CheckpointError, match="ids below 5"):
        tokenizer_files(MetadataKeys(Path("m.gguf"), values))


def test_bytes_of_sentencepiece_are_known_by_name_where_types_are_missing() -> None:
    byte_names = [f"<0x{i:02X}>" for i in range(256)]
    changes = {"tokens": ["<unk>", "a", *byte_names], "scores": np.zeros(258, np.float32), "token_type": None}
    ours = tokenizer(**{**SPM, **changes, "bos_token_id": None, "eos_token_id": None, "add_space_prefix": False})
    assert ours.encode("a\t", add_special_tokens=False) == [1, 2 + 9]


def test_no_template_is_no_chat_model(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, BUNDLED / "tiny")
        del writer.kv_data[0]["tokenizer.chat_template"]

    assert of(BUNDLED / "tiny", tmp_path, fill).chat_template is None


def test_several_templates_are_kept_by_their_names(tmp_path: Path) -> None:
    templates = [{"name": name, "template": name * 2} for name in ("default", "tool_use", "rag")]

    def fill(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, BUNDLED / "tiny")
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_chat_template(templates)

    checkpoint = of(BUNDLED / "tiny", tmp_path, fill)
    opened = checkpoint.chat_template
    assert opened is not None and opened.sources == {each["name"]: each["template"] for each in templates}
    assert json.loads(checkpoint.files["tokenizer_config.json"])["chat_template"] == templates, "for engines, too"
