"""Model shapes that costs depend on: from a config.json, or one of the presets."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from millrace.checkpoint.config.decoder_sizes import SIZES, DecoderSizes, read_config_file, read_sizes
from millrace.errors import ConfigError, nearest, sanitize

_TUNED = re.compile(r"(-(instruct|chat|it|hf|base|v0\.[12]))+$")  # of one size, other weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(DecoderSizes):
    """Sizes of a decoder, and the parameter counts that follow from them."""

    @property
    def attention_parameters(self) -> int:
        """Return the attention parameters of all layers."""
        heads = 2 * self.n_heads + 2 * self.n_kv_heads
        return self.n_layers * self.hidden * self.head_dim * heads

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of one expert in each layer."""
        return self._of_width(self.ffn)

    def _of_width(self, width: int) -> int:
        return self.n_layers * (3 if self.gated else 2) * self.hidden * width

    @property
    def always_parameters(self) -> int:
        """Return the parameters that every token uses in all layers: attention and shared experts."""
        return self.attention_parameters + self._of_width(self.shared)

    @property
    def parameters(self) -> int:
        """Return the parameters of all layers, without embeddings and head."""
        return self.always_parameters + max(1, self.experts) * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Return the parameters of all layers that a token is multiplied by."""
        return self.always_parameters + max(1, self.experts_active) * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def stored_parameters(self) -> int:
        return self.parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def kv_values(self) -> int:
        """Return the KV-cache elements of a token."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    def attended_tokens(self, context: float) -> float:
        """Return how many tokens of a context attention reads (sliding window)."""
        return min(context, self.window) if self.window else context

    def pairs(self, n: float) -> float:
        """Return twice the number of attention pairs in the first n tokens of a sequence."""
        reached = self.attended_tokens(n)
        return reached**2 + 2 * reached * (n - reached)

    def touched_parameters(self, n_tokens: float) -> float:
        """Return the layer parameters that a step of n tokens reads; tokens choose experts uniformly at random."""
        if not self.experts:
            return self.parameters
        met: float = self.experts * (1 - (1 - self.experts_active / self.experts) ** n_tokens)
        return self.always_parameters + met * self.expert_parameters


def _preset(name: str, sizes: tuple[int, ...], **more: Any) -> ModelShape:
    """Create a preset. sizes: layers, hidden, heads, KV heads, head size, feed-forward, vocabulary, context"""
    fields: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
    return ModelShape(name=name, **fields, **more)


# From the published configurations.
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
    """Find a preset, or read a config.json or a folder with one. raises ConfigError, CheckpointError"""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return shape_from_config(read_config_file(path), path.resolve().parent.name)
    key = name.casefold()
    if key not in PRESETS:
        bare = _TUNED.sub("", key.rsplit("/", 1)[-1])  # of the Hub's names
        suggestion = f'did you mean "{bare}"? It has the same sizes' if bare in PRESETS else nearest(bare, PRESETS)
        raise ConfigError(
            f"no model is known as {sanitize(name)}",
            "a preset, or the path of its config.json, or of its folder",
            suggestion,
        )
    return PRESETS[key]


def shape_from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """Read the shape from a configuration. raises CheckpointError, ConfigError"""
    return ModelShape(**asdict(read_sizes(config, name)))
