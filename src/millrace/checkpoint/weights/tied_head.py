"""Tied heads: checkpoints that tie the head to the embedding may store either of them, or both, equal or different.

As in transformers 5 (`PreTrainedModel.tie_weights`): equal tensors are tied; different ones are both used, with a
warning; if one is missing, the other is used for both.
"""

from dataclasses import replace

import numpy as np

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.weights.safetensors import Tensors

HEAD_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "model.embed_tokens.weight"


def resolve_tied_head(config: ModelConfig, tensors: Tensors) -> tuple[ModelConfig, Tensors, tuple[str, ...]]:
    """Return the configuration, the tensors and notes, so that no stored tensor is dropped.

    If both tensors are stored, they are compared block by block up to the first difference. raises CheckpointError
    """
    if not config.tie_embeddings or HEAD_WEIGHT not in tensors:
        return config, tensors, ()
    if EMBEDDING_WEIGHT not in tensors:
        return config, tensors.renamed(HEAD_WEIGHT, EMBEDDING_WEIGHT), ()
    if _are_equal(tensors):
        return config, tensors, ()
    note = (
        f"config.json ties the head to the embedding (tie_word_embeddings), but {HEAD_WEIGHT} is stored and differs "
        f"from {EMBEDDING_WEIGHT}: both are used, as in transformers 5; set tie_word_embeddings to false to confirm"
    )
    return replace(config, tie_embeddings=False), tensors, (note,)


def _are_equal(tensors: Tensors) -> bool:
    head, embedding = tensors[HEAD_WEIGHT], tensors[EMBEDDING_WEIGHT]
    if head.shape != embedding.shape or head.dtype != embedding.dtype:
        return False
    if tensors.format(HEAD_WEIGHT) is not None or tensors.format(EMBEDDING_WEIGHT) is not None:
        return False  # quantized separately: both are used as stored
    pairs = zip(tensors.blocks(HEAD_WEIGHT), tensors.blocks(EMBEDDING_WEIGHT), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
