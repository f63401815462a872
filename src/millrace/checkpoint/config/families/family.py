"""What is known of a model family before its checkpoint is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Neutral = tuple[tuple[object, ...], str]  # the values at which a key has no effect, and what other values would change


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertScheme:
    """The keys of config.json that describe a family's experts, and how it routes if no key says so.

    size: the width of an expert's MLP; layers: which layers have experts, as read by expert_config.py
    normalise: whether the weights of a row's experts are divided by their sum; None: norm_topk_prob says so
    shared: the key of the number of shared experts, or of their width; "": there are none
    bias: whether the choice of experts has a bias of its own; a name is the key that says so
    """

    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    layers: str = "all"
    scoring: str = "softmax"
    normalise: bool | None = None
    epsilon: float = 0.0
    shared: str = ""
    bias: bool | str = False


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model family. `defaults` maps each key that is used to transformers' value if the key is missing.

    qk_norm: "head" if each query and key head is normalized, "full" if all heads are as one row, "" for neither
    rope_theta: base of the rotary embedding if config.json has none
    norm: of the residual stream, as in ModelConfig
    rotary_share: of each head that rotates if config.json does not say; interleaved: as in RopeConfig
    """

    name: str  # also config.json's model_type
    architecture: str
    defaults: Mapping[str, object]
    only_at: Mapping[str, Neutral] = field(default_factory=dict)
    is_encoder: bool = False  # it computes embeddings, not next tokens
    also: tuple[str, ...] = ()  # the same architecture with a head, which an encoder does not use
    older_keys: Mapping[str, str] = field(default_factory=dict)  # another name of a key -> its name in `defaults`
    cross_encoder: str = ""  # the architecture with a classifier, which gives a score for two texts
    qk_norm: str = ""
    rope_theta: float = 10_000.0
    norm: str = "rms"
    gated_mlp: bool = True
    parallel_residual: bool = False
    rotary_share: float = 1.0
    interleaved: bool = False
    attention_sinks: bool = False
    experts: ExpertScheme | None = None


# source: models/*/configuration_*.py of transformers 5; null if transformers derives the value from other keys
COMMON: dict[str, object] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": None,
    "layer_types": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def without_rms(defaults: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in defaults.items() if key != "rms_norm_eps"}
