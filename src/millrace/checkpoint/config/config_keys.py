"""Tables for `read_config`: activations, and the keys of all families that are refused or have no effect.

`families/` has the keys that each family uses, `declared_keys.py` those that transformers' classes declare. A declared
key that is in none of these tables is refused unless it has its default value. An undeclared key has no effect in
transformers and is listed in a note.
"""

from collections.abc import Mapping

from millrace.checkpoint.config.families.family import Neutral

# hidden_act -> the name of the formula; swish is silu, gelu_new is the tanh approximation written out
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "squared_relu",
}
# For encoders, "gelu" is the exact function; in Gemma's files it is the tanh approximation.
ENCODER_ACTIVATIONS: Mapping[str, str] = {
    **ACTIVATIONS,
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These do not affect the model's results at any value and are not worth a note: training settings, implementation
# choices, heads of other tasks, and metadata that transformers or its users write everywhere.
HARMLESS = _words(
    """
    _name_or_path name_or_path _commit_hash transformers_version auto_map tokenizer_class
    use_cache attention_dropout hidden_dropout residual_dropout embedding_dropout resid_pdrop embd_pdrop
    initializer_range pad_token_id unk_token_id sep_token_id cls_token_id
    decoder_start_token_id _attn_implementation attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _experts_implementation experts_implementation _flash_attn_2_enabled use_flash_attn
    use_flash_attention_2 output_attentions output_hidden_states return_dict torchscript use_bfloat16 is_decoder
    chunk_size_feed_forward gradient_checkpointing id2label label2id num_labels problem_type task_specific_params
    finetuning_task tie_last_hidden_states max_length max_sequence_length is_llama_config transformers.js_config
    pretraining_tp tie_encoder_decoder cross_attention_hidden_size pruned_heads
    attention_probs_dropout_prob hidden_dropout_prob classifier_dropout directionality pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type output_past
    tie_word_embeddings bos_token_id eos_token_id is_matryoshka matryoshka_dimensions
    """  # pretraining_tp computes the same sums in slices; transformers 5 no longer reads it
    # an encoder has no head to tie and generates no text with bos and eos; decoders read these three keys
)

# Generation defaults that older versions of transformers stored in config.json; version 5 drops them.
GENERATION_KEYS = _words(
    "do_sample temperature top_k top_p min_p typical_p repetition_penalty min_length max_new_tokens num_beams "
    "no_repeat_ngram_size length_penalty early_stopping bad_words_ids num_return_sequences"
)

# transformers applies these to every family: they change the model's results, except at these values.
ONLY_AT: Mapping[str, Neutral] = {
    "quantization_config": (
        (None,),
        "compressed-tensors, gptq, awq, fp8, modelopt, bitsandbytes are read, of decoders",
    ),
    "compression_config": ((None,), "compressed checkpoints are not read yet"),
    "partial_rotary_factor": ((None, 1, 1.0), "RoPE turns whole heads"),
    "is_encoder_decoder": ((None, False), "models of two stacks are not supported"),
    "add_cross_attention": ((None, False), "models of two stacks are not supported"),
}
