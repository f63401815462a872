"""GGUF files for tests, written by the `gguf` package from a Hugging Face folder as llama.cpp's converter would."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType

from benchmarks.peers.gguf_file import ARCHITECTURES, describe, gguf_name, neighbours
from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.graph.types import Array

# sizes at which every block type fits, and small
BLOCKY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 768,
}  # fmt: skip
# Families that GGUF files have, with what their metadata can say: no other scale of scores, no other order of windows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 72, "num_hidden_layers": 3},
    "gemma3_text": {"query_pre_attn_scalar": 72, "num_hidden_layers": 7, "layer_types": None},
}  # fmt: skip
_NO_QUANTISER = (
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
)  # of which the gguf package can only dequantise

Edit = Callable[[gguf.GGUFWriter], None]
KindOf = Callable[[str], Kind]  # of the tensor's name in the file; norms and biases are float32 always


def write_gguf(
    path: Path,
    folder: Path,
    kind: Kind | KindOf = Kind.F32,
    *,
    edit: Edit | None = None,
    leave_out: tuple[str, ...] = (),
    tokenizer: Edit | None = None,
) -> Path:
    """The checkpoint in `folder` as a GGUF file; the path.

    kind: of the matrices; edit: adds metadata or tensors; leave_out: tensors; tokenizer: instead of the folder's own
    """
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.decoder
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.family])
    describe(writer, config)
    if config.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factor)
    (tokenizer or (lambda w: add_tokenizer(w, folder, n_tokens=config.vocab_size)))(writer)
    for name in checkpoint.tensors:
        stored = gguf_name(name, config.family)
        if stored in leave_out:
            continue
        array = _arranged(config, stored, checkpoint.tensors.load(name))
        one = kind if isinstance(kind, Kind) else kind(stored)
        add_tensor(writer, stored, array, one if array.ndim == 2 else Kind.F32)
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, array: Array, kind: Kind) -> None:
    x = array.astype(np.float32)
    if kind == Kind.F32:
        writer.add_tensor(name, x)
    elif kind == Kind.F16:
        writer.add_tensor(name, x.astype(np.float16))
    else:
        raw = random_blocks(x, kind) if kind in _NO_QUANTISER else gguf.quants.quantize(x, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)


def random_blocks(x: Array, kind: Kind, extreme: bool = False) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of random codes in the shape of x (N, K), with weights of about x's size, or with scales of any bits."""
    rng = np.random.default_rng(x.size)
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (x.shape[0], x.shape[1] // weights, nbytes), dtype=np.uint8)
    if not extreme:
        step = np.float16(x.std() / (32 * 16)).tobytes()
        places = {Kind.Q6_K: (208,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2)}.get(kind, (0,))
        for at in places:
            raw[:, :, at : at + 2] = np.frombuffer(step, np.uint8)
    return raw.reshape(x.shape[0], -1)


def _arranged(c: ModelConfig, name: str, array: Array) -> Array:
    """As convert_hf_to_gguf.py arranges it."""
    part = name.split(".")[-2]
    if c.family in ("llama", "mistral") and part in ("attn_q", "attn_k"):
        heads = c.n_heads if part == "attn_q" else c.n_kv_heads
        return neighbours(array, heads)
    if c.family.startswith("gemma") and name.endswith("norm.weight"):
        return array.astype(np.float32) + np.float32(1)
    return array


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2", n_tokens: int = 0) -> None:
    """tokenizer.json of `folder`, byte-level or with byte fallback, padded to `n_tokens`."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    model = raw["model"]
    tokens, types = _tokens(raw, n_tokens)
    if model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(_scores(tokens, model["merges"]))
        prepends = "Prepend" in json.dumps(raw["normalizer"])
        writer.add_add_space_prefix(prepends)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_token_types(types)
    writer.add_add_bos_token(raw["post_processor"] is not None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
    ):
        if config.get(name):
            add(tokens.index(config[name]))
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def _tokens(raw: Mapping[str, Any], n_tokens: int) -> tuple[list[str], list[TokenType]]:
    """All tokens by id, padded as converters do, and what each is."""
    vocab: dict[str, int] = dict(raw["model"]["vocab"])
    added = {token["content"]: token for token in raw["added_tokens"]}
    vocab |= {text: token["id"] for text, token in added.items()}
    by_id = {i: text for text, i in vocab.items()}
    tokens, types = [], []
    for i in range(max(max(by_id) + 1, n_tokens)):
        text = by_id.get(i, f"[PAD{i}]")
        kind = TokenType.NORMAL if i in by_id else TokenType.UNUSED
        if text in added:
            kind = TokenType.CONTROL if added[text]["special"] else TokenType.USER_DEFINED
        elif raw["model"]["byte_fallback"] and text.startswith("<0x") and text.endswith(">"):
            kind = TokenType.BYTE
        if text == raw["model"]["unk_token"]:
            kind = TokenType.UNKNOWN
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """SentencePiece prefers higher scores: minus the rank of the first merge that makes a token."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
