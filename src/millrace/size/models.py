"""What the cost of a model depends on: read from any config.json, or one of the presets.

More families than the engine serves: a purchase is planned before there is a checkpoint.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from millrace.errors import ConfigError, nearest, plain
from millrace.settings import once, read_given

_MOST_BYTES = 1 << 20  # of a config.json
_MOST = 1 << 24  # of any size in it
_TUNED = re.compile(r"(-(instruct|chat|it|hf|base|v0\.[12]))+$")  # of one size, other weights
_SIZES = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab", "max_context")

# What makes memory and time of a token others than those of attention as it is known here.
_OTHERWISE = {
    "kv_lora_rank": "keys and values are compressed (MLA), which is not modelled",
    **dict.fromkeys(("hybrid_override_pattern", "layers_block_type", "attn_layer_period", "mamba_d_state", "ssm_cfg"),
                    "layers without attention are not modelled"),
}  # fmt: skip
_SOME_LAYERS = ("gemma2", "gemma3", "gemma3_text", "gpt_oss", "cohere2")  # in which alone a window is


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder. experts: of a layer (0: dense), of which a token visits `experts_active`

    shared: width of what each token visits beside those; window: tokens that attention reaches back in all layers,
    where that is less than the context
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int  # of one expert, where there are some
    vocab: int
    max_context: int
    gated: bool = True  # three matrices in a feed-forward layer, else two
    experts: int = 0
    experts_active: int = 0
    shared: int = 0
    window: int | None = None
    tied: bool = False  # the head is the embedding table

    def __post_init__(self) -> None:
        for name in _SIZES:
            if not 0 < getattr(self, name) <= _MOST:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}", f"1 to {_MOST}", "correct it")
        if not 0 <= self.shared <= _MOST or not (self.window is None or 0 < self.window <= _MOST):
            raise ConfigError(f"{self.name}: {self.shared} for shared experts, a window of {self.window}",
                              f"at most {_MOST} each", "correct the configuration")  # fmt: skip
        if self.n_kv_heads > self.n_heads:
            raise ConfigError(f"{self.name}: {self.n_kv_heads} heads of keys and values for {self.n_heads} of queries",
                              "no more than these", "correct the configuration")  # fmt: skip
        if not 0 <= self.experts_active <= self.experts <= 4096 or (self.experts > 0) != (self.experts_active > 0):
            raise ConfigError(
                f"{self.name}: a token visits {self.experts_active} of {self.experts} experts",
                "at least one, and no more than there are", "correct the configuration",
            )  # fmt: skip

    @property
    def attention_parameters(self) -> int:
        """Of all layers."""
        heads = 2 * self.n_heads + 2 * self.n_kv_heads
        return self.n_layers * self.hidden * self.head_dim * heads

    @property
    def expert_parameters(self) -> int:
        """Of all layers, one expert of each."""
        return self._of_width(self.ffn)

    def _of_width(self, width: int) -> int:
        return self.n_layers * (3 if self.gated else 2) * self.hidden * width

    @property
    def always_parameters(self) -> int:
        """Of all layers, what every token visits: attention, and shared experts."""
        return self.attention_parameters + self._of_width(self.shared)

    @property
    def parameters(self) -> int:
        """Of all layers; without embeddings and head."""
        return self.always_parameters + max(1, self.experts) * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Of those, the ones that a token is multiplied by."""
        return self.always_parameters + max(1, self.experts_active) * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def stored_parameters(self) -> int:
        return self.parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def kv_values(self) -> int:
        """Numbers that a token leaves in the cache."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    def reached(self, context: float) -> float:
        """Tokens of a context that attention looks at."""
        return min(context, self.window) if self.window else context

    def pairs(self, n: float) -> float:
        """Twice the pairs of tokens that attend to one another in the first n of a sequence."""
        reached = self.reached(n)
        return reached**2 + 2 * reached * (n - reached)

    def touched_parameters(self, n_tokens: float) -> float:
        """Of the layers, what a step of so many tokens reads: each token draws its experts evenly, for itself."""
        if not self.experts:
            return self.parameters
        met: float = self.experts * (1 - (1 - self.experts_active / self.experts) ** n_tokens)
        return self.always_parameters + met * self.expert_parameters


def _preset(name: str, sizes: tuple[int, ...], **more: Any) -> ModelShape:
    """sizes: layers, hidden, heads, KV heads, head size, feed-forward, vocabulary, context"""
    named: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    return ModelShape(name=name, **named, **more)


# From the configurations that their makers published.
PRESETS: Mapping[str, ModelShape] = MappingProxyType({m.name: m for m in (
    _preset("llama-2-7b", (32, 4096, 32, 32, 128, 11008, 32000, 4096)),
    _preset("llama-2-13b", (40, 5120, 40, 40, 128, 13824, 32000, 4096)),
    _preset("llama-2-70b", (80, 8192, 64, 8, 128, 28672, 32000, 4096)),
    _preset("llama-3-8b", (32, 4096, 32, 8, 128, 14336, 128256, 8192)),
    _preset("llama-3-70b", (80, 8192, 64, 8, 128, 28672, 128256, 8192)),
    _preset("llama-3.1-8b", (32, 4096, 32, 8, 128, 14336, 128256, 131072)),
    _preset("llama-3.1-70b", (80, 8192, 64, 8, 128, 28672, 128256, 131072)),
    _preset("llama-3.1-405b", (126, 16384, 128, 8, 128, 53248, 128256, 131072)),
    _preset("llama-3.2-1b", (16, 2048, 32, 8, 64, 8192, 128256, 131072), tied=True),
    _preset("llama-3.2-3b", (28, 3072, 24, 8, 128, 8192, 128256, 131072), tied=True),
    _preset("nemotron-4-15b", (32, 6144, 48, 8, 128, 24576, 256000, 4096), gated=False),
    _preset("nemotron-4-340b", (96, 18432, 96, 8, 192, 73728, 256000, 4096), gated=False),
    _preset("nemo-43b", (48, 8192, 64, 64, 128, 21824, 256000, 4096)),
    _preset("falcon-7b", (32, 4544, 71, 1, 64, 18176, 65024, 2048), gated=False, tied=True),
    _preset("falcon-40b", (60, 8192, 128, 8, 64, 32768, 65024, 2048), gated=False, tied=True),
    _preset("falcon-180b", (80, 14848, 232, 8, 64, 59392, 65024, 2048), gated=False, tied=True),
    _preset("mpt-7b", (32, 4096, 32, 32, 128, 16384, 50432, 2048), gated=False, tied=True),
    _preset("mpt-30b", (48, 7168, 64, 64, 112, 28672, 50432, 8192), gated=False, tied=True),
    _preset("mistral-7b", (32, 4096, 32, 8, 128, 14336, 32000, 32768), window=4096),
    _preset("mistral-7b-v0.3", (32, 4096, 32, 8, 128, 14336, 32768, 32768)),
    _preset("mixtral-8x7b", (32, 4096, 32, 8, 128, 14336, 32000, 32768), experts=8, experts_active=2),
    _preset("mixtral-8x22b", (56, 6144, 48, 8, 128, 16384, 32768, 65536), experts=8, experts_active=2),
    _preset("qwen2.5-0.5b", (24, 896, 14, 2, 64, 4864, 151936, 32768), tied=True),
    _preset("qwen2.5-7b", (28, 3584, 28, 4, 128, 18944, 152064, 32768)),
    _preset("qwen2.5-72b", (80, 8192, 64, 8, 128, 29568, 152064, 32768)),
    _preset("qwen3-8b", (36, 4096, 32, 8, 128, 12288, 151936, 40960)),
    _preset("qwen3-32b", (64, 5120, 64, 8, 128, 25600, 151936, 40960)),
    _preset("qwen3-30b-a3b", (48, 2048, 32, 4, 128, 768, 151936, 40960), experts=128, experts_active=8),
    _preset("gpt-oss-20b", (24, 2880, 64, 8, 64, 2880, 201088, 131072), experts=32, experts_active=4),
    _preset("gpt-oss-120b", (36, 2880, 64, 8, 64, 2880, 201088, 131072), experts=128, experts_active=4),
    _preset("smollm2-135m", (30, 576, 9, 3, 64, 1536, 49152, 8192), tied=True),
    _preset("tinyllama-1.1b", (22, 2048, 32, 4, 64, 5632, 32000, 2048)),
)})  # fmt: skip


def find_model(name: str) -> ModelShape:
    """A preset, or the shape in a config.json or a folder that holds one. raises ConfigError"""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return read_model(path)
    wanted = name.casefold()
    if wanted not in PRESETS:
        bare = _TUNED.sub("", wanted.rsplit("/", 1)[-1])  # of the Hub's names
        meant = f'did you mean "{bare}"? It has the same sizes' if bare in PRESETS else nearest(bare, PRESETS)
        raise ConfigError(
            f"no model is known as {plain(name)}", "a preset, or the path of its config.json, or of its folder", meant
        )
    return PRESETS[wanted]


def read_model(path: Path) -> ModelShape:
    """raises ConfigError"""
    try:
        data = read_given(path, _MOST_BYTES)
        config = json.loads(data, object_pairs_hook=once) if len(data) <= _MOST_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "a config.json", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {plain(str(error))}", "a config.json", "check the file") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no configuration", f"a JSON object of at most {_MOST_BYTES} bytes", "check it")
    return of_config(config, path.resolve().parent.name)


def of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """From the keys that families write them under. raises ConfigError, also for what would be sized wrongly"""
    inner = config.get("text_config")
    if inner is not None:  # of a model that sees, too: its decoder
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: text_config is {inner!r:.40}", "an object", "correct config.json")
        config = {**config, **inner}
    for key, why in _OTHERWISE.items():
        if config.get(key):
            raise ConfigError(f"{name}: {key}: {why}", "attention with its keys and values in every layer",
                              "take the preset or config.json of a model alike, which has that")  # fmt: skip
    find = _Keys(config, name)
    hidden, n_heads = find("hidden_size", "n_embd", "d_model"), find("num_attention_heads", "n_head", "n_heads")
    n_kv = find("num_key_value_heads", "num_kv_heads", "n_head_kv", default=n_heads)
    experts = find("num_local_experts", "num_experts", "n_routed_experts", default=0, low=0)
    ffn = find("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", default=4 * hidden)
    of_expert = find("moe_intermediate_size", default=ffn) if experts else ffn
    each = find("n_shared_experts", default=0, low=0) * of_expert
    shared = find("shared_expert_intermediate_size", default=each, low=0)
    return ModelShape(
        name=name, n_layers=find("num_hidden_layers", "n_layer", "n_layers"), hidden=hidden, n_heads=n_heads,
        n_kv_heads=1 if find.flag("multi_query") and "num_kv_heads" not in config else n_kv,
        head_dim=find("head_dim", default=max(1, hidden // n_heads)), ffn=of_expert, vocab=find("vocab_size"),
        max_context=find("max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        gated=find.text("model_type") not in ("falcon", "RefinedWeb", "mpt", "gpt2", "nemotron", "opt"),
        experts=experts, experts_active=find("num_experts_per_tok", default=0, low=0) if experts else 0,
        shared=shared if experts else 0, window=_window(find), tied=find.flag("tie_word_embeddings"),
    )  # fmt: skip


def _window(find: "_Keys") -> int | None:
    """Of all layers. Where only some look back no further, all are taken to look back to the beginning: what is planned
    then is rather too much than too little."""
    if not find.flag("use_sliding_window", default=True):
        return None
    window = find("sliding_window", default=0)
    some = any(kind != "sliding_attention" for kind in find.names("layer_types"))
    some = some or find.has_pattern("sliding_window_pattern") or find.text("model_type") in _SOME_LAYERS
    return window if window and not some else None


class _Keys:
    """What a config.json has. Each raises ConfigError for a value of another kind, under the name that it stands by."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def __call__(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """The number under the first of those names."""
        for name in names:
            if (value := self._config.get(name)) is not None:
                if type(value) is not int or not low <= value <= _MOST:
                    raise self._wrong(name, value, f"a whole number from {low} to {_MOST}")
                return value
        if default is None:
            raise ConfigError(f"{self._name}: config.json has no {names[0]}", "a decoder's sizes", "complete it")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._config.get(name)
        if not isinstance(value, str | None):
            raise self._wrong(name, value, "a name")
        return value or ""

    def names(self, name: str) -> list[str]:
        value = self._config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(name, value, "a list of names")
        return value

    def has_pattern(self, name: str) -> bool:
        """Of layers: every so many of them is another one, or a letter for each ("LLLG")."""
        letters = self._config.get(name)
        return (isinstance(letters, str) and letters.isalpha()) or self(name, default=0) > 0

    def _wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self._name}: {name} is {value!r:.40}", expected, "correct config.json")
