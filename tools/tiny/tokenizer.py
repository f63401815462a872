"""The tokenizer: byte-level BPE of 2,048 tokens, trained on the little world, with the chat's role markers.

The base alphabet is the 256 bytes, so any UTF-8 text is encoded and comes back unchanged. Digits stand alone: a sum is
then made of the same few tokens whatever its numbers are.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.tiny.world import ASSISTANT, BOS, END, EOS, SYSTEM, USER, document

PAD = "<|pad|>"
SPECIAL = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)
VOCAB = 2048
_SPLIT = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|\s")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(n_documents: int = 12_000) -> Tokenizer:
    """BPE on training documents from 100,000 on, where the mixture has settled."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        "".join(p.text for p in document(i) if p.text not in SPECIAL) for i in range(100_000, 100_000 + n_documents)
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB}; train on more text")
    bos = (BOS, token_id(tokenizer, BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, f"{token} is not in the vocabulary"
    return found


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [EOS, SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "bos_token_id": token_id(tokenizer, BOS),
        "eos_token_id": [token_id(tokenizer, END), token_id(tokenizer, EOS)],
        "pad_token_id": token_id(tokenizer, PAD),
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "max_new_tokens": 256,
    }
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
