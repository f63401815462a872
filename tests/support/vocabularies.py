"""Tiny tokenizers of each kind, trained in a fraction of a second on a made-up corpus."""

import io
import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

ENGLISH = "the river runs past a mill and the miller counts his sacks while the wheel turns slowly in spring"
OTHERS = 'naïve café Zürich über Straße 東京 日本語 こんにちは привет мир 42 3.14 1,000 can\'t (see) "it" a-b x_y\tz'
WORDS = tuple(f"{ENGLISH} {OTHERS}".split(" "))
SPACES = (" ", " ", " ", " ", "  ", "\n", "\n\n")
# of every UTF-8 length, most of them not in the corpus: combining marks, joiners, flags, private and last code points
STRANGE = (
    "aZ09 \t\n~éßñ\u0301\u00a0Жя\u05d0\u0e01中文字\u200d\ufeff\ufffd€😀"
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea\U0010fffd\U0001d518"
)


def corpus(seed: int = 0, n_lines: int = 300) -> list[str]:
    rng = random.Random(seed)
    return [
        "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randint(4, 14))).strip()
        for _ in range(n_lines)
    ]


def strange_text(rng: random.Random, n: int) -> str:
    """`n` pieces: corpus words, characters of STRANGE and random code points (no surrogates)."""
    parts = []
    for _ in range(n):
        code = rng.choice([rng.randrange(0x20, 0x800), rng.randrange(0x800, 0xD800), rng.randrange(0xE000, 0x110000)])
        parts.append(rng.choice([rng.choice(WORDS), " ", rng.choice(STRANGE), rng.choice(STRANGE), chr(code)]))
    return "".join(parts)


def save_byte_level(folder: Path, vocab_size: int = 700) -> None:
    """GPT-2's and Qwen's kind, with ChatML's special tokens; no bos. Two added tokens are not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 5, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool call>", normalized=False), "<think>"])
    config = {"eos_token": "<|im_end|>", "bos_token": None, "add_bos_token": False, "pad_token": "<|endoftext|>"}
    _save(folder, tokenizer, config, CHATML)


def save_byte_fallback(folder: Path, vocab_size: int = 700, decoder: str = "strip") -> None:
    """Llama 2's kind: a space before the text, `<0xNN>` for what is not in the vocabulary, `<s>` in front.

    decoder: "strip" (Llama), "keep" (Gemma: no space is added or taken away), "metaspace" (older conversions)
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=vocab_size - 259, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {token: i for i, token in enumerate([*first, *sorted(model["vocab"], key=model["vocab"].__getitem__)])}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if decoder == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    else:
        prepend = [normalizers.Prepend("▁")] if decoder == "strip" else []
        steps += [decoders.Strip(" ", 1, 0)] if decoder == "strip" else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    _save(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, INSTRUCT)


def save_word_pieces(folder: Path, **config: object) -> None:
    """BERT's kind: lower case, `##` before what goes on, [CLS] and [SEP] around a text;
    cut and padded, as files may say.

    config: keys of tokenizer_config.json
    """
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=named, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.WordPiece()
    around = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.post_processor = around
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    keys = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {"tokenizer_class": "BertTokenizer", **dict(zip(keys, named, strict=True)), **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))


_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_ROBERTA_NAMED = {
    "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": False},
}  # fmt: skip


def save_roberta(folder: Path, **config: object) -> None:
    """RoBERTa's kind: byte-level BPE, <s> and </s> around a text. config: keys of tokenizer_config.json"""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=_ROBERTA, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    _save_roberta(folder, tokenizer, {"tokenizer_class": "RobertaTokenizer", **config})


def save_xlm_roberta(folder: Path, **config: object) -> None:
    """XLM-RoBERTa's kind: SentencePiece's unigrams without byte fallback, <s> and </s> around a text.

    config: keys of tokenizer_config.json
    """
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=_ROBERTA, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    around = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
    tokenizer.post_processor = processors.TemplateProcessing(**around, special_tokens=[("<s>", 0), ("</s>", 2)])
    _save_roberta(folder, tokenizer, {"tokenizer_class": "XLMRobertaTokenizer", **config})


def _save_roberta(folder: Path, tokenizer: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    tokenizer.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**_ROBERTA_NAMED, **config}))


def save_sentencepiece(folder: Path, vocab_size: int = 600, dummy_prefix: bool = True, **config: object) -> None:
    """tokenizer.model and tokenizer_config.json, as Llama 2's repository has them."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=written,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    whole: dict[str, object] = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    whole |= {"add_bos_token": True, "add_eos_token": False, "legacy": False, "chat_template": INSTRUCT, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))


CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

INSTRUCT = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}
[{{ message.role }}] {{ message.content | trim }}{{ eos_token if message.role == 'assistant' }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]{% endif %}"""


def _save(folder: Path, tokenizer: tokenizers.Tokenizer, config: Mapping[str, object], template: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))


KINDS: dict[str, Callable[[Path], None]] = {
    "byte level": save_byte_level,
    "byte fallback": save_byte_fallback,
    "byte fallback, no space": partial(save_byte_fallback, decoder="keep"),
    "metaspace": partial(save_byte_fallback, decoder="metaspace"),
    "word pieces": save_word_pieces,
    "roberta": save_roberta,
    "xlm-roberta": save_xlm_roberta,
    "sentencepiece": save_sentencepiece,
    "sentencepiece, no space": partial(save_sentencepiece, dummy_prefix=False),
}
# What models that write have: every byte can be said, and no token is spelled otherwise at the beginning of a text.
OF_DECODERS = tuple(kind for kind in KINDS if kind not in ("word pieces", "xlm-roberta"))
