"""Fields of requests that are no members of their structs: known to change nothing, or not supported yet.

Another protocol of ours has its own beside its structs.
"""

from collections.abc import Mapping

# They say something about accounts, caches or billing of a hosted service; any value is taken and changes no answer.
HARMLESS: frozenset[str] = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ]
)
# Of memory and threads: llama.cpp's names, and Ollama's.
_MEMORY: frozenset[str] = frozenset(
    [
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock"),
        *("low_vram", "f16_kv", "vocab_only"),
    ]
)
# Of llama.cpp's samplers that are off.
_OF_SAMPLERS: frozenset[str] = frozenset(
    [
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    ]
)
# Those that Ollama's clients send in `options`, and llama.cpp's beside the other fields.
IGNORED_OPTIONS = _MEMORY | _OF_SAMPLERS
# Other servers know them: OpenAI's for reasoning models, vLLM's, SGLang's and llama.cpp's for caches and batches,
# Ollama's for memory, LiteLLM's and OpenRouter's for routing. Any value is taken, changes no answer here, and is named
# in the header `x-millrace-ignored` and in the log.
IGNORED: frozenset[str] = IGNORED_OPTIONS | frozenset(
    [
        *("reasoning_effort", "verbosity", "reasoning", "include_reasoning", "separate_reasoning", "stream_reasoning"),
        *("think", "thinking", "prediction"),
        *("request_id", "kv_transfer_params", "mm_processor_kwargs", "rid", "cache_prompt", "id_slot"),
        *("timings_per_token", "return_progress"),
        *("keep_alive", "provider", "route", "models", "transforms", "usage", "session_id", "trace", "tags"),
        *("caching", "drop_params", "num_retries", "timeout", "request_timeout", "fallbacks"),
    ]
)
# What others call a field of ours.
OTHER_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "random_seed": "seed",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "enable_thinking": "chat_template_kwargs",
    "best_of": "n",
    "system": "messages",
    "instructions": "messages",
    "input": "messages",
}
# Fields of the other endpoint.
ELSEWHERE: Mapping[str, str] = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
# They would change the answer. A value that asks for what happens anyway is taken; anything else is refused.
CHAT_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
}
COMPLETION_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
}
VLLM_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "options": ({},),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}
# llama.cpp's and the programs' around it, which send each of them with every request; with the value of "off".
LLAMA_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "xtc_probability": (0,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "smoothing_factor": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "penalize_nl": (False,),
    "penalize_newline": (True,),
    "repeat_last_n": (-1,),
    "n_keep": (0, -1),
    "num_keep": (0, -1),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_probs": (0,),
    "min_keep": (0,),
    "t_max_predict_ms": (0,),
    "post_sampling_probs": (False,),
    "grammar": ("",),
    "json_schema": ({},),
    "lora": ([],),
    "num_beams": (1,),
}
EMBEDDING_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "priority": (0,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (),
    "use_activation": (),
    "messages": (),
    "additional_data": (),
    "input_type": (),
}
NEARNESS_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "priority": (0,),
    "softmax": (),
    "activation": (),
    "use_activation": (),
    "rank_fields": (["text"], []),
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "overlap_tokens": (),
}
# What to use in place of some, said behind "leave it out".
INSTEAD: Mapping[str, str] = {
    "prompt_logprobs": "; /v1/completions tells them with echo and logprobs, and max_tokens 0 for the prompt alone",
    "normalize": ": vectors have the length that the model's own files say, which is 1 for most",
    "max_tokens_per_doc": "; truncate_prompt_tokens cuts texts",
    "functions": "; tools takes them",
    "function_call": "; tool_choice takes it",
    "grammar": "; structured_outputs takes it",
    "json_schema": "; response_format or structured_outputs takes it",
}
