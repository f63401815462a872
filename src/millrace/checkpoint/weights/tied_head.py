"""Checkpoints whose config.json ties the head to the embedding and that store one of them, both, or two different ones.

As in transformers 5 (`PreTrainedModel.tie_weights`): two equal tensors are one; two different ones are both used, with
a warning; where one is missing, the other stands for both.
"""

from dataclasses import replace

import numpy as np

from millrace.checkpoint.config.model_config import ModelConfig
from millrace.checkpoint.weights.safetensors import Tensors

HEAD_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "model.embed_tokens.weight"


def resolve_tied_head(config: ModelConfig, tensors: Tensors) -> tuple[ModelConfig, Tensors, tuple[str, ...]]:
    """Return the configuration, the tensors and notes, such that no stored tensor is dropped.

    Reads both tensors, block by block up to the first difference, if both are stored. raises CheckpointError
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
        return False  # rounded apart: what either stores is used
    pairs = zip(tensors.blocks(HEAD_WEIGHT), tensors.blocks(EMBEDDING_WEIGHT), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
