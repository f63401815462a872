"""Which class builds which architecture, and which tensors of old checkpoints are known to be no weights."""

import re
from collections.abc import Callable

from millrace.checkpoint.config import ModelConfig
from millrace.errors import CheckpointError, nearest
from millrace.model.decoder import CausalLM
from millrace.model.gemma import GemmaForCausalLM
from millrace.model.llama import LlamaForCausalLM
from millrace.model.mistral import MistralForCausalLM
from millrace.model.module import Module
from millrace.model.qwen2 import Qwen2ForCausalLM
from millrace.model.qwen3 import Qwen3ForCausalLM

FAMILIES: dict[str, Callable[[ModelConfig], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "GemmaForCausalLM": GemmaForCausalLM,
}

HEAD = "lm_head"  # what every family calls its head, as Hugging Face's checkpoints do

_ROTARY_BUFFER = re.compile(r"\.rotary_emb\.inv_freq$")  # saved by early versions of transformers; computed here


def build_model(config: ModelConfig) -> Module:
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise CheckpointError(
            f'architecture "{config.architecture}" is not supported',
            nearest(config.architecture, FAMILIES),
            "convert it, or add it as a Module",
        )
    return family(config)


def is_weight(name: str, config: ModelConfig) -> bool:
    """False for tensors that a checkpoint may carry and the model rightly ignores."""
    tied_head = config.tie_embeddings and name == f"{HEAD}.weight"
    return not tied_head and not _ROTARY_BUFFER.search(name)
