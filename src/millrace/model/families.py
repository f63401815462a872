"""The class of each architecture, and tensors of old checkpoints that are not weights."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.config.model_config import ModelConfig
from millrace.errors import CheckpointError, nearest
from millrace.model.bert import (
    BertForSequenceClassification,
    RobertaForSequenceClassification,
    bert_sentences,
    parameter_name,
)
from millrace.model.decoder import CausalLM
from millrace.model.gemma import Gemma2ForCausalLM, GemmaForCausalLM
from millrace.model.glm4 import Glm4ForCausalLM, GlmForCausalLM
from millrace.model.lfm2 import Lfm2ForCausalLM
from millrace.model.llama import LlamaForCausalLM
from millrace.model.module import Module
from millrace.model.mpnet import mpnet_sentences
from millrace.model.nomic_bert import nomic_bert_sentences
from millrace.model.olmo2 import Olmo2ForCausalLM
from millrace.model.phi import PhiForCausalLM
from millrace.model.phi3 import Phi3ForCausalLM
from millrace.model.starcoder2 import Starcoder2ForCausalLM

Family = TypeVar("Family")
FAMILIES: dict[str, Callable[[ModelConfig], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "SmolLM3ForCausalLM": LlamaForCausalLM,
    "StableLmForCausalLM": LlamaForCausalLM,
    "NemotronForCausalLM": LlamaForCausalLM,
    "CohereForCausalLM": LlamaForCausalLM,
    "Cohere2ForCausalLM": LlamaForCausalLM,
    "Starcoder2ForCausalLM": Starcoder2ForCausalLM,
    "PhiForCausalLM": PhiForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Ernie4_5ForCausalLM": LlamaForCausalLM,
    "GlmForCausalLM": GlmForCausalLM,
    "Glm4ForCausalLM": Glm4ForCausalLM,
    "GraniteForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": LlamaForCausalLM,
    "Qwen2MoeForCausalLM": LlamaForCausalLM,
    "Qwen3MoeForCausalLM": LlamaForCausalLM,
    "OlmoeForCausalLM": LlamaForCausalLM,
    "GraniteMoeForCausalLM": LlamaForCausalLM,
    "PhimoeForCausalLM": LlamaForCausalLM,
    "Ernie4_5_MoeForCausalLM": LlamaForCausalLM,
    "Glm4MoeForCausalLM": LlamaForCausalLM,
    "GptOssForCausalLM": LlamaForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo2ForCausalLM,
    "Exaone4ForCausalLM": Olmo2ForCausalLM,
    "GemmaForCausalLM": GemmaForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma2ForCausalLM,
    "Lfm2ForCausalLM": Lfm2ForCausalLM,
    "Lfm2MoeForCausalLM": Lfm2ForCausalLM,
}
ENCODERS: dict[str, Callable[[EncoderConfig], Module]] = {
    "BertModel": bert_sentences,
    "RobertaModel": bert_sentences,
    "XLMRobertaModel": bert_sentences,
    "CamembertModel": bert_sentences,
    "NomicBertModel": nomic_bert_sentences,
    "MPNetModel": mpnet_sentences,
    "BertForSequenceClassification": BertForSequenceClassification,
    "RobertaForSequenceClassification": RobertaForSequenceClassification,
    "XLMRobertaForSequenceClassification": RobertaForSequenceClassification,
    "CamembertForSequenceClassification": RobertaForSequenceClassification,
}

HEAD = "lm_head"  # the head's name in every family, as in Hugging Face's checkpoints

_ROTARY_BUFFER = re.compile(r"\.rotary_emb\.inv_freq$")  # saved by early versions of transformers; computed here


def build_model(config: ModelConfig | EncoderConfig) -> Module:
    if isinstance(config, EncoderConfig):
        return _family_names(ENCODERS, config.architecture)(config)
    return _family_names(FAMILIES, config.architecture)(config)


def _family_names(families: Mapping[str, Family], architecture: str) -> Family:
    if architecture not in families:
        raise CheckpointError(
            f'architecture "{architecture}" is not supported',
            nearest(architecture, families),
            "convert it, or add it as a Module",
        )
    return families[architecture]


def parameter_of(tensor: str, config: ModelConfig | EncoderConfig) -> str | None:
    """Return the parameter of a checkpoint's tensor; None for one that is safely ignored."""
    if isinstance(config, EncoderConfig):
        return parameter_name(tensor, config.architecture)
    tied_head = config.tie_embeddings and tensor == f"{HEAD}.weight"
    return None if tied_head or _ROTARY_BUFFER.search(tensor) else tensor
