"""A GGUF file's tokenizer and configuration as a Hugging Face folder, which an engine of it is for other programs."""

import json
from pathlib import Path

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from tests.support.checkpoints import random_checkpoint
from tests.support.gguf_files import write_gguf

TEXTS = ["Once upon a time", "naïve", ""]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_transformers_reads_the_tokenizer_and_the_configuration(tmp_path: Path, family: str) -> None:
    import transformers

    source = random_checkpoint(tmp_path / "hf", family, seed=4)
    opened = Checkpoint.open(write_gguf(tmp_path / "m.gguf", source))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in opened.files.items():
        (folder / name).write_bytes(content)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer(text).input_ids == opened.tokenizer.encode(text, add_special_tokens=True)
    config, original = (transformers.AutoConfig.from_pretrained(f) for f in (folder, source))
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "tie_word_embeddings")
    assert [getattr(config, n, None) for n in names] == [getattr(original, n, None) for n in names]
    # transformers 4 needs the name of a class that it knows
    assert json.loads(opened.files["tokenizer_config.json"])["tokenizer_class"] in (
        "LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast",
    )  # fmt: skip
