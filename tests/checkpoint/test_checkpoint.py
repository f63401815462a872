"""A whole folder: what is opened, what is put together, what identifies it, and that importing it costs little."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.checkpoint.checkpoint import Checkpoint, open_chat_template
from millrace.errors import CheckpointError
from tests.support.checkpoints import FAMILIES, random_checkpoint
from tests.support.shared import shared
from tests.support.vocabularies import save_byte_level, save_sentencepiece


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("original"), "llama", seed=1, max_shard_size="500KB")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens_and_holds_its_tensors(tmp_path: Path, family: str) -> None:
    random_checkpoint(tmp_path, family, seed=2, dtype="bfloat16")
    opened = Checkpoint.open(tmp_path)
    config = opened.decoder
    assert (config.family, config.dtype, config.n_layers, opened.notes) == (family, "bfloat16", 2, ())
    q = opened.tensors["model.layers.1.self_attn.q_proj.weight"]
    assert q.shape == (config.n_heads * config.head_dim, config.hidden_size)
    assert ("lm_head.weight" in opened.tensors) == (not config.tie_embeddings)
    assert ("model.layers.0.self_attn.q_proj.bias" in opened.tensors) == config.attention_bias
    assert opened.chat_template is not None
    prompt = opened.chat_template.render([{"role": "user", "content": "the mill"}])
    ids = opened.tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[0] in opened.tokenizer.special_ids and max(ids) < config.vocab_size
    # where a space is put in front of a text, it is also put in front of what follows a special token
    assert opened.tokenizer.decode(ids, skip_special_tokens=False).replace("> ", ">") == prompt
    opened.chat_template.close()


def test_both_spellings_open_alike(tmp_path: Path) -> None:
    new = Checkpoint.open(random_checkpoint(tmp_path / "new", "qwen2"))
    old = Checkpoint.open(random_checkpoint(tmp_path / "old", "qwen2", old_spelling=True))
    assert new.config == old.config and old.decoder.rope.theta == 1e6
    assert "rope_theta" in json.loads((tmp_path / "old" / "config.json").read_text())


def test_the_real_small_model() -> None:
    opened = Checkpoint.open(shared("models/stories260K"))
    assert (opened.decoder.family, opened.decoder.max_context, opened.decoder.n_kv_heads) == ("llama", 512, 4)
    assert opened.eos_token_ids == (2,) and opened.chat_template is None and opened.notes == ()
    assert opened.tensors.nbytes == 1_040_128


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_dtype_comes_from_the_weights_where_the_config_is_silent(folder: Path) -> None:
    edit(folder / "config.json", dtype=None)
    assert Checkpoint.open(folder).decoder.dtype == "float32"
    edit(folder / "config.json", dtype="bfloat16")
    opened = Checkpoint.open(folder)
    assert opened.decoder.dtype == "bfloat16" and "stored as float32" in opened.notes[0]


def test_end_of_text_comes_from_the_most_specific_file(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 8])
    assert Checkpoint.open(folder).eos_token_ids == (7, 8, 2)  # and the tokenizer's
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(folder).eos_token_ids == (2,)
    save_byte_level(folder)
    edit(folder / "config.json", eos_token_id=None)
    assert Checkpoint.open(folder).eos_token_ids == (Checkpoint.open(folder).tokenizer.eos_token_id,)
    edit(folder / "config.json", eos_token_id=5)
    (folder / "tokenizer.json").unlink()
    assert Checkpoint.open(folder).eos_token_ids == (5,)


def test_identity_changes_with_anything_that_matters(folder: Path) -> None:
    first = Checkpoint.open(folder).identity()
    assert first == Checkpoint.open(folder).identity() and len(first) == 32
    seen = {first}
    shard = sorted(folder.glob("*.safetensors"))[0]
    os.utime(shard, ns=(1, 1))
    assert Checkpoint.open(folder).identity() == first
    data = bytearray(shard.read_bytes())
    data[len(data) * 2 // 3] ^= 1  # in the midst of a tensor
    shard.write_bytes(data)
    seen.add(Checkpoint.open(folder).identity())
    edit(folder / "config.json", rms_norm_eps=1e-4)
    seen.add(Checkpoint.open(folder).identity())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(Checkpoint.open(folder).identity())
    (folder / "README.md").write_text("words")
    seen.add(Checkpoint.open(folder).identity())
    assert len(seen) == 4


def test_identity_does_not_depend_on_the_place(original: Path, folder: Path) -> None:
    assert Checkpoint.open(original).identity() == Checkpoint.open(folder).identity()


def test_templates_in_every_place(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    edit(config, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    opened = Checkpoint.open(folder).chat_template
    assert opened is not None and opened.source == "d"
    (folder / "chat_template.jinja").write_text("file é", encoding="utf-8")
    opened = Checkpoint.open(folder).chat_template
    assert opened is not None and opened.source == "file é"
    (folder / "chat_template.jinja").unlink()
    for value, word in (([{"name": "rag", "template": "t"}], "rag"), (3, "3"), ([{"name": "default"}], "default")):
        edit(config, chat_template=value)
        with pytest.raises(CheckpointError, match=word):
            assert Checkpoint.open(folder).chat_template
    edit(config, chat_template=None)
    assert Checkpoint.open(folder).chat_template is None
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="UTF-8"):
        assert Checkpoint.open(folder).chat_template


NAMED = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R"}


@pytest.mark.parametrize("place", ["list", "folder", "list behind files"])
def test_several_templates_are_those_of_transformers(folder: Path, tmp_path: Path, place: str) -> None:
    """In the checkpoint, and in the files that an engine carries."""
    import transformers

    entries = [{"name": name, "template": source} for name, source in NAMED.items()]
    edit(folder / "tokenizer_config.json", chat_template=entries if place == "list" else None)
    if place != "list":
        more = folder / "additional_chat_templates"
        more.mkdir()
        for name, source in NAMED.items():
            (folder / "chat_template.jinja" if name == "default" else more / f"{name}.jinja").write_text(source)
        (more / "README.md").write_text("{{ not a template }}")
    if place == "list behind files":
        edit(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "never"}])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == NAMED
    checkpoint = Checkpoint.open(folder)
    opened = checkpoint.chat_template
    assert opened is not None and opened.sources == NAMED
    carried = tmp_path / "engine"
    carried.mkdir()
    for name, content in checkpoint.files.items():
        (carried / name).write_bytes(content)
    again = open_chat_template(carried, checkpoint.tokenizer)
    assert again is not None and again.sources == NAMED
    assert transformers.AutoTokenizer.from_pretrained(carried).chat_template == NAMED
    messages, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}]
    options: list[dict[str, Any]] = [{}, {"tools": tools}, {"tools": []}]
    for extra in options:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
        assert again.render(messages, extra=extra) == expected
    again.close()


def test_a_template_in_the_folder_changes_the_identity(folder: Path) -> None:
    before = Checkpoint.open(folder).identity()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert Checkpoint.open(folder).identity() != before


def test_a_template_for_tools_alone_is_taken_for_all(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "t"}])
    opened = Checkpoint.open(folder).chat_template
    assert opened is not None and opened.source == opened.source_for(True) == "t"


def test_the_default_of_the_configuration_stands_beside_a_folder_without_one(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="d")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    opened = Checkpoint.open(folder).chat_template
    assert opened is not None and opened.sources == {"default": "d", "tool_use": "t"}


def test_too_many_templates(folder: Path) -> None:
    entries = [{"name": f"{i}", "template": ""} for i in range(65)]
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": ""}, *entries])
    with pytest.raises(CheckpointError, match="66 templates"):
        assert Checkpoint.open(folder).chat_template


def test_a_sentencepiece_checkpoint(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    save_sentencepiece(folder)
    opened = Checkpoint.open(folder)
    assert opened.tokenizer.bos_token_id == 1 and opened.chat_template is not None
    text = opened.chat_template.render([{"role": "user", "content": "hi"}])
    assert text.startswith("<s>[user] hi") and opened.tokenizer.encode(text, add_special_tokens=False)[0] == 1
    opened.chat_template.close()


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"\xff\xff", "not JSON"),
        ("generation_config.json", b'{"temperature": "hot"}', "temperature"),
        ("model-00002-of-00005.safetensors", None, "missing"),
    ],
)
def test_broken_folders(folder: Path, name: str, content: bytes | None, word: str) -> None:
    target = folder / name
    if "safetensors" in name:
        target = sorted(folder.glob("*.safetensors"))[1]
    target.unlink()
    if content is not None:
        target.write_bytes(content)
    with pytest.raises(CheckpointError, match=word):
        Checkpoint.open(folder)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        Checkpoint.open(tmp_path / "missing")


def test_importing_is_light() -> None:
    """No deep-learning framework, and nothing that is only sometimes needed."""
    code = (
        "import sys, millrace.checkpoint.checkpoint, millrace.checkpoint.hub, millrace.checkpoint.chat.chat_template;"
        "heavy = {'torch', 'transformers', 'tokenizers', 'sentencepiece', 'jinja2', 'huggingface_hub', 'asyncio'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
