"""Reads sentence-transformers' files of an encoder: how rows become a vector, and how long a text may be.

modules.json lists the steps: the transformer, a pooling, and perhaps a normalization. A folder without it is a plain
transformer: like sentence-transformers, use the mean without normalization, and report it.
source: sentence-transformers 6.2, and the older spellings that it reads
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from millrace.checkpoint.config.config_reader import Raw
from millrace.checkpoint.config.cross_encoder import ACTIVATION, activation_named
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.tokenizer.tokenizer import (
    SENTENCE_CONFIG,
    TOKENIZER_CONFIG,
    parsed_json,
    read_files,
    read_json_object,
)
from millrace.errors import CheckpointError, nearest

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
POOLINGS = ("mean", "cls")
# Older folders have one key per pooling method.
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_POOLING_KNOWN = {
    *_POOLING_KEYS, "pooling_mode", "embedding_dimension", "word_embedding_dimension",
    "include_prompt",  # no effect without prompts
}  # fmt: skip
# Keys of sentence_bert_config.json without effect at these values.
_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "transformer_task": ("feature-extraction",), "module_output_name": ("token_embeddings",),
    "modality_config": (_TEXT,), "unpad_inputs": (None, True, False),
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
    **dict.fromkeys(("model_args", "tokenizer_args", "config_args", "processing_kwargs"), (None, {})),
    **dict.fromkeys(("model_kwargs", "processor_kwargs", "config_kwargs"), (None, {})),
}  # fmt: skip
# The same keys of a cross-encoder's.
_NEUTRAL_FOR_SCORES: dict[str, tuple[object, ...]] = {
    "transformer_task": ("sequence-classification",), "module_output_name": ("scores",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "logits"}},),
}  # fmt: skip
_LONGEST_NAME = 60  # name of a module's folder
_AGAIN = "download the checkpoint again, or choose another encoder"


def with_sentences(config: EncoderConfig, folder: Path) -> EncoderConfig:
    """Return the configuration completed from these files. raises CheckpointError if they are damaged or unsupported"""
    notes = (*config.notes, *_prompt_notes(folder))
    if config.score_activation:
        limit = _longest_text(folder, config, _NEUTRAL | _NEUTRAL_FOR_SCORES)
        return replace(config, score_activation=_activation(folder, config), max_context=limit, notes=notes)
    pooling, normalised, more = _pooling(folder, config.hidden_size)
    limit = _longest_text(folder, config, _NEUTRAL)
    return replace(config, pooling=pooling, normalised=normalised, max_context=limit, notes=(*notes, *more))


def sentence_files(folder: Path, config: EncoderConfig) -> dict[str, bytes]:
    """Return the files that determine a text's vector or a score, except config.json, the tokenizer and the weights."""
    if config.score_activation:
        return read_files(folder, (MODULES, PROMPTS))
    if not (folder / MODULES).is_file():
        return {}
    return read_files(folder, (MODULES, *(f"{where}/config.json" for _, where in _modules(folder / MODULES) if where)))


def _activation(folder: Path, config: EncoderConfig) -> str:
    """Return the activation of a cross-encoder's score. raises CheckpointError"""
    path = folder / MODULES
    if path.is_file() and (modules := _modules(path)) not in ([("Transformer", "")],):
        raise CheckpointError(
            f"{path} lists {', '.join(kind for kind, _ in modules) or 'nothing'}",
            "Transformer alone, with its files beside modules.json", "choose another cross-encoder",
        )  # fmt: skip
    value = read_json_object(folder / PROMPTS).get(ACTIVATION)
    return config.score_activation if value is None else activation_named(ACTIVATION, value, PROMPTS)


def _pooling(folder: Path, hidden_size: int) -> tuple[str, bool, tuple[str, ...]]:
    """Return the pooling, whether the vector is normalized, and notes."""
    path = folder / MODULES
    if not path.is_file():
        what = "a text's vector is the mean of its rows and is not normalised, as in sentence-transformers"
        return "mean", False, (f"there is no {MODULES}: {what}",)
    modules = _modules(path)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"{path} lists {', '.join(kinds) or 'nothing'}", "Transformer, Pooling, and perhaps Normalize",
            "choose an encoder of these modules",
        )  # fmt: skip
    if modules[0][1]:
        raise CheckpointError(
            f"{path}: the transformer lies in {modules[0][1]!r}", "its files beside modules.json",
            "save the model again with a newer sentence-transformers",
        )  # fmt: skip
    kind = _pooling_kind(folder / modules[1][1] / "config.json", hidden_size)
    for _, where in modules[2:]:
        _check_normalize(folder / where / "config.json" if where else None)
    return kind, len(kinds) == 3, ()


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return (last word of the type, folder) of each module, in order."""
    try:
        raw = parsed_json(read_files(path.parent, [path.name])[path.name])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", "a list of modules", _AGAIN) from error
    result = []
    for entry in raw if isinstance(raw, list) else [raw]:
        kind, where = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        named = isinstance(where, str) and len(where) <= _LONGEST_NAME and where.isprintable()
        local = named and (not where or (Path(str(where)).name == where and where != ".."))
        if not isinstance(kind, str) or not local:
            shown = '{"type": its class, "path": a folder beside this file, or ""}'
            raise CheckpointError(f"{path} has the module {entry!r:.200}", shown, _AGAIN)
        result.append((kind.rsplit(".", 1)[-1], str(where)))
    return result


def _pooling_kind(path: Path, hidden_size: int) -> str:
    if not path.is_file():
        raise CheckpointError(f"there is no {path}", "the pooling that modules.json names", _AGAIN)
    raw = read_json_object(path)
    _check_known(path, raw, _POOLING_KNOWN)
    for key in ("embedding_dimension", "word_embedding_dimension"):
        if raw.get(key, hidden_size) != hidden_size:
            raise CheckpointError(
                f"{path}: {key} is {raw[key]!r:.60}", f"{hidden_size}, the hidden_size of config.json",
                "check that both files belong to the same model",
            )  # fmt: skip
    for key in _POOLING_KEYS:
        if not isinstance(raw.get(key, False), bool):
            raise CheckpointError(f"{path}: {key} is {raw[key]!r:.60}", "true or false", "correct it")
    older = [name for key, name in _POOLING_KEYS.items() if raw.get(key)]
    unsaid = "pooling_mode_mean_tokens" not in raw  # on by default, unless another one is set
    modes = raw.get("pooling_mode", older or ("mean" if unsaid else []))
    kinds = modes if isinstance(modes, list) else [modes]
    if len(kinds) != 1 or kinds[0] not in POOLINGS:
        shown = " and ".join(f"{kind!s:.60}" for kind in kinds) or "nothing"
        raise CheckpointError(f"{path}: the pooling is {shown}", " or ".join(POOLINGS), "choose an encoder with these")
    return str(kinds[0])


def _check_normalize(path: Path | None) -> None:
    for key, value in read_json_object(path).items() if path else ():
        if value not in ("sentence_embedding", None):
            raise CheckpointError(
                f"{path}: {key} is {value!r:.60}", '"sentence_embedding"', "choose an encoder without it"
            )


def _longest_text(folder: Path, config: EncoderConfig, neutral: Mapping[str, tuple[object, ...]]) -> int:
    """Return the limit in tokens: max_seq_length of sentence_bert_config.json, otherwise the tokenizer's, otherwise all
    positions. neutral: keys of this file, and their values without effect"""
    path = folder / SENTENCE_CONFIG
    raw = read_json_object(path)
    _check_known(path, raw, {"max_seq_length", "do_lower_case", *neutral})
    for key, values in neutral.items():
        if key in raw and raw[key] not in values:
            allowed = " or ".join(map(str, values))
            raise CheckpointError(f"{path}: {key} is {raw[key]!r:.60}", allowed, "choose an encoder without it")
    length, max_positions = raw.get("max_seq_length"), config.max_positions
    if length is not None:
        n_rows = max_positions + config.first_position  # some RoBERTa files count the unused rows, too: 514 for 512
        if isinstance(length, bool) or not isinstance(length, int) or not 0 < length <= n_rows:
            allowed = f"1 to {max_positions}, the positions of config.json"
            raise CheckpointError(f"{path}: max_seq_length is {length!r:.60}", allowed, "correct max_seq_length")
        return min(length, max_positions)
    limit = read_json_object(folder / TOKENIZER_CONFIG).get("model_max_length")
    if isinstance(limit, int) and not isinstance(limit, bool) and 0 < limit < max_positions:
        return limit
    return max_positions  # a tokenizer without a limit has 1e30


def _prompt_notes(folder: Path) -> tuple[str, ...]:
    """Return a note on prompts, which are not applied: only the client knows the kind of a text."""
    path = folder / PROMPTS
    raw = read_json_object(path)
    prompts, name = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not (name is None or isinstance(name, str)):
        raise CheckpointError(f"{path} has the prompts {prompts!r:.200}", "an object of texts", _AGAIN)
    if name is not None and prompts.get(name):
        raise CheckpointError(
            f"{path} puts its prompt {name!r} before every text", "no default prompt",
            "make default_prompt_name null, and send the prompt with your texts",
        )  # fmt: skip
    names = ", ".join(str(key) for key, text in prompts.items() if text)
    return (f"the model's prompts ({names}) are not put before texts: send them with the text",) if names else ()


def _check_known(path: Path, raw: Raw, valid_keys: set[str]) -> None:
    for key in raw:
        if key not in valid_keys:
            raise CheckpointError(
                f"{path}: unknown key {key!r}", nearest(key, valid_keys), "correct the key, or remove it"
            )
