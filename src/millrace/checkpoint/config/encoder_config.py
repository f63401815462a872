"""Reads `config.json` of an encoder into a frozen `EncoderConfig`: every key is used, known to have no effect, or an
error."""

from dataclasses import dataclass

from millrace.checkpoint.config import cross_encoder
from millrace.checkpoint.config.config_keys import ENCODER_ACTIVATIONS
from millrace.checkpoint.config.config_reader import (
    HEAD_SIZES,
    MAX_LAYERS,
    ConfigReader,
    Raw,
    check_keys,
    family_of,
    head_fits,
    read_dtype,
    wrong,
)
from millrace.checkpoint.config.families.family import ModelFamily
from millrace.checkpoint.config.rope_config import RopeConfig, read_ropes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Configuration of an encoder.

    `checkpoint/config/sentence_transformers.py` completes the last four fields, which other files have.
    """

    architecture: str  # "BertModel" | "RobertaModel" | ...; of a cross-encoder "BertForSequenceClassification" | ...
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    vocab_size: int
    max_positions: int  # tokens of the longest text that the model can read
    n_types: int
    rope: RopeConfig | None = None  # None: positions are embedded
    distance_buckets: int = 0  # of biases of attention scores by distance (arXiv:1910.10683); 0: there are none
    first_position: int = 0  # row of the position table that embeds a text's first token
    norm_eps: float
    activation: str  # "gelu" | "gelu_tanh" | "relu" | "silu"
    dtype: str = "float32"
    notes: tuple[str, ...] = ()  # to be shown to the user
    pooling: str = "mean"  # how rows become a vector: "mean" | "cls"
    normalised: bool = True  # whether vectors are normalized to length 1
    score_activation: str = ""  # of a cross-encoder: "sigmoid" | "identity"; "": it is none
    max_context: int = 0  # tokens of the longest text that the authors intend


def read_encoder(raw: Raw) -> EncoderConfig:
    """Parse config.json. raises CheckpointError that names the key, its value and what was expected"""
    family = family_of(raw)
    raw = _with_present_names(raw, family)
    scores = raw.get("architectures") == [family.cross_encoder]
    notes = check_keys({k: v for k, v in raw.items() if not (scores and k in cross_encoder.KEYS)}, family)
    if scores:
        cross_encoder.check_one_label(raw)
    read = ConfigReader(raw, family)
    hidden_size, n_heads = read.positive_int("hidden_size"), read.positive_int("num_attention_heads")
    if hidden_size % n_heads:
        raise wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads {n_heads}")
    if read.get("head_dim") not in (None, hidden_size // n_heads):
        raise wrong("head_dim", read.get("head_dim"), f"hidden_size divided by num_attention_heads {n_heads}")
    if not head_fits(hidden_size // n_heads):
        raise wrong("num_attention_heads", n_heads, f"hidden_size {hidden_size} divided by it {HEAD_SIZES}")
    activation = read.get("hidden_act")
    if not isinstance(activation, str) or activation not in ENCODER_ACTIVATIONS:
        raise wrong("hidden_act", activation, "one of " + ", ".join(sorted(ENCODER_ACTIVATIONS)))
    names = raw.get("architectures") or [family.architecture]
    if isinstance(names, list) and names != [family.architecture] and not scores:
        notes += (f"the head of {names[0]} is not used: this model gives a vector for each text",)
    first_position, max_positions = _positions(read)
    rope = None
    if "rope_parameters" in family.defaults:
        (rope, _), more = read_ropes(read, max_positions)
        notes += more
    return EncoderConfig(
        architecture=family.cross_encoder if scores else family.architecture, hidden_size=hidden_size,
        intermediate_size=read.positive_int("intermediate_size"),
        n_layers=read.positive_int("num_hidden_layers", high=MAX_LAYERS), n_heads=n_heads,
        vocab_size=read.positive_int("vocab_size"), max_positions=max_positions,
        rope=rope,
        n_types=read.positive_int("type_vocab_size") if "type_vocab_size" in family.defaults else 1,
        first_position=first_position, distance_buckets=_distance_buckets(read),
        norm_eps=read.positive_float("layer_norm_eps"),
        activation=ENCODER_ACTIVATIONS[activation], dtype=read_dtype(raw), notes=notes, max_context=max_positions,
        score_activation=cross_encoder.read_activation(raw) if scores else "",
    )  # fmt: skip


def _distance_buckets(read: ConfigReader) -> int:
    if "relative_attention_num_buckets" not in read.family.defaults:
        return 0
    return read.positive_int("relative_attention_num_buckets")


_SWIGLU = "swiglu"  # the gated MLP with silu, whose name Nomic's files give as the activation


def _with_present_names(raw: Raw, family: ModelFamily) -> Raw:
    """Return config.json with each key under its name in `defaults`. raises CheckpointError if two names disagree"""
    result = {key: value for key, value in raw.items() if key not in family.older_keys}
    for older, key in family.older_keys.items():
        if (value := raw.get(older)) is None:
            continue
        value = "silu" if value == _SWIGLU else value
        if result.get(key) not in (None, value):
            raise wrong(older, value, f"the same as {key}, which is {result[key]!r}", "remove one of the two")
        result[key] = value
    return result


def _positions(read: ConfigReader) -> tuple[int, int]:
    """Return the first position's row in the table, and the number of positions.

    RoBERTa, whose families read pad_token_id, counts positions from the row after it. (transformers also gives a
    padding token within a text that row; here every token has the position that follows.)
    """
    n_rows = read.positive_int("max_position_embeddings")
    if "pad_token_id" not in read.family.defaults:
        return 0, n_rows
    pad = 1 if read.family.name == "mpnet" else read.get("pad_token_id")  # MPNet does not read its own
    if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < n_rows - 1:
        raise wrong("pad_token_id", pad, f"0 to {n_rows - 2}: positions follow it, up to max_position_embeddings")
    return pad + 1, n_rows - pad - 1
