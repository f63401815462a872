"""All families of which checkpoints are read."""

from collections.abc import Mapping

from millrace.checkpoint.config.families.encoder import ENCODERS
from millrace.checkpoint.config.families.experts import EXPERTS
from millrace.checkpoint.config.families.family import ModelFamily
from millrace.checkpoint.config.families.gemma import GEMMA
from millrace.checkpoint.config.families.hybrid import HYBRID
from millrace.checkpoint.config.families.layer_norm import LAYER_NORM
from millrace.checkpoint.config.families.llama import LLAMA_LIKE
from millrace.checkpoint.config.families.post_norm import POST_NORM

# by config.json's model_type
FAMILIES: Mapping[str, ModelFamily] = {
    family.name: family for family in (*LLAMA_LIKE, *LAYER_NORM, *POST_NORM, *EXPERTS, *GEMMA, *HYBRID, *ENCODERS)
}
