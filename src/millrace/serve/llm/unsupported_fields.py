"""Tables of request fields that are not in the structs: known to change nothing, or not supported yet.

Other protocols have their own tables next to their structs. Names that are in no table follow the rule of
`unknown_fields.py`.
"""

from collections.abc import Mapping

import msgspec


class _Negative:
    """A value that equals every number below 0, for use in a table."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and other < 0

    def __hash__(self) -> int:
        return 0


NEGATIVE = _Negative()


def format_value(neutral: object) -> str:
    """Format a value of a table for an error."""
    return "a number below 0" if neutral is NEGATIVE else msgspec.json.encode(neutral).decode()


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value asks for what happens anyway: it is empty, or one of `neutral`."""
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    return any((type(value) is not bool and value == one) or value is one for one in neutral)


# They concern accounts, caches or billing of a hosted service; any value is accepted and changes no answer.
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
# Memory and threads: llama.cpp's names, and Ollama's.
_MEMORY: frozenset[str] = frozenset(
    [
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock"),
        *("low_vram", "f16_kv", "vocab_only", "num_gqa", "n_gqa", "gqa", "logits_all", "flash_attn", "cache_type"),
        *("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_gpu", "n_gpu_layers", "ctx_size", "batch_size", "threads"),
    ]
)
# Options of llama.cpp's samplers, without effect if the sampler is off.
_OF_SAMPLERS: frozenset[str] = frozenset(
    [
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "smoothing_curve"),
        *("dynatemp_low", "dynatemp_high", "dynatemp_min", "dynatemp_max", "min_temp", "max_temp", "adaptive_decay"),
        *("tfs_min_keep", "smoothing_range"),
    ]
)
# Handling of a full context, which is never shifted here, and the order of samplers, which is fixed here.
_OF_CONTEXTS: frozenset[str] = frozenset(
    [
        *("num_keep", "n_keep", "n_discard", "truncation_length", "max_context_length", "max_length_tokens"),
        *("samplers", "sampler_priority", "sampler_order", "sampler_seed_mode", "temperature_last"),
    ]
)
# Ollama's clients send them in `options`, llama.cpp's next to the other fields.
IGNORED_OPTIONS = _MEMORY | _OF_SAMPLERS | _OF_CONTEXTS
# Fields of other servers: OpenAI's for reasoning models, vLLM's, SGLang's and llama.cpp's for caches and batches,
# Ollama's for memory, LiteLLM's and OpenRouter's for routing. Any value is accepted, changes no answer here, and is
# reported in the header `x-millrace-ignored` and in the log.
IGNORED: frozenset[str] = IGNORED_OPTIONS | frozenset(
    [
        *("reasoning_effort", "verbosity", "reasoning", "include_reasoning", "separate_reasoning", "stream_reasoning"),
        *("think", "thinking", "prediction"),
        *("request_id", "kv_transfer_params", "mm_processor_kwargs", "rid", "cache_prompt", "id_slot"),
        *("timings_per_token", "return_progress"),
        *("keep_alive", "provider", "route", "models", "transforms", "usage", "session_id", "trace", "tags"),
        *("caching", "drop_params", "num_retries", "timeout", "request_timeout", "fallbacks"),
        # open-webui's and text-generation-webui's, for themselves
        *("mode", "title", "files", "params", "features", "variables", "tool_ids", "tool_servers", "chat_id", "id"),
        *("client_metadata", "legacy_api", "api_type", "api_server"),
        # of programs that make more than text, and of the conversation as they show it
        *("style", "speed", "topic", "theme", "voice", "size", "num", "top", "state", "score", "step", "steps"),
        *("top_n", "language"),
        "web_search_options",
    ]
)
# Other servers' names of our fields: the first of these that the endpoint has.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_output_tokens", "num_predict", "n_predict", "max_completion_tokens", "max_length",
         "max_tokens_to_sample", "maxOutputTokens"),
        ("max_tokens",),
    ),
    **dict.fromkeys(("max_gen_len", "max_gen_tokens", "n_tokens", "num_tokens"), ("max_tokens",)),
    **dict.fromkeys(("temp",), ("temperature",)),
    **dict.fromkeys(("repeat_penalty", "rep_pen", "rep_penalty", "penalty_repeat"), ("repetition_penalty",)),
    **dict.fromkeys(("presence_pen", "penalty_present", "pres_pen"), ("presence_penalty",)),
    **dict.fromkeys(("frequency_pen", "penalty_freq", "freq_pen"), ("frequency_penalty",)),
    **dict.fromkeys(
        ("stop_sequences", "stopping_strings", "stop_sequence", "stop_words", "stop_strings", "stop_str"), ("stop",)
    ),
    "penalty_last_n": ("repeat_last_n",),
    **dict.fromkeys(("random_seed", "sampler_seed", "rng_seed"), ("seed",)),
    **dict.fromkeys(("num_return_sequences", "num_completions", "candidate_count", "num_samples"), ("n",)),
    **dict.fromkeys(("min_new_tokens", "min_predict"), ("min_tokens",)),
    "format": ("response_format", "text"),
    "response_format": ("response_format", "format", "text"),
    "regex": ("structured_outputs",),
    "ebnf": ("structured_outputs",),
    "structural_tag": ("structured_outputs",),
    **dict.fromkeys(("system", "instructions"), ("system", "instructions", "messages")),
    **dict.fromkeys(("input", "inputs", "messages"), ("messages", "prompt", "input")),
    **dict.fromkeys(("text", "texts"), ("prompt", "input")),
}  # fmt: skip
# Fields of the other endpoint.
ELSEWHERE: Mapping[str, str] = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
# They would change the answer. A value that asks for what happens anyway is accepted; any other is refused.
CHAT_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "top_logprobs_num": (0,),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "return_token_ids": (False,),
    "prompt_embeds": (),
    "resume_token_ids": ([],),
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
    "logits_processors": ([],),
    "logit_processors": ([],),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "guided_whitespace_pattern": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "lora_path": (),
    "lora_request": (),
    "adapter_id": (),
    "adapters": (),
    "return_hidden_states": (False,),
}
# How far back one penalty looks (repeat_last_n is for all of them), and whether they spare line ends: of no effect
# where no penalty is set.
_RANGES = ("rep_pen_range", "repetition_penalty_range", "presence_penalty_range", "frequency_penalty_range")
PENALTY_WINDOW: frozenset[str] = frozenset([*_RANGES, "penalize_nl", "penalize_newline"])
PENALTIES: Mapping[str, float] = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
# llama.cpp's and the programs' around it, which send each of them with every request; with the value of "off".
LLAMA_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "mirostat_mode": (0,),
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
    **dict.fromkeys(_RANGES, (0, NEGATIVE)),  # 0 is the whole context, as in text-generation-webui
    **dict.fromkeys(("penalize_nl", "penalize_newline"), (True,)),
    **dict.fromkeys(("rope_frequency_base", "rope_freq_base"), (0,)),
    **dict.fromkeys(("rope_frequency_scale", "rope_freq_scale"), (0, 1)),
    "embedding_only": (False,),
    "n_indent": (0,),
    "n_probs": (0,),
    "min_keep": (0,),
    "t_max_predict_ms": (0,),
    "post_sampling_probs": (False,),
    "grammar": ("",),
    "json_schema": ({},),
    "lora": ([],),
    "num_beams": (1,),
    "do_sample": (True,),
    "typical": (1,),
    "tfs": (1,),
    "nsigma": (0, -1),
    "adaptive_target": (NEGATIVE,),
    "dynamic_temperature": (False,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "grammar_string": ("",),
    "grammar_triggers": ([],),
    "custom_token_bans": ("",),
    "banned_tokens": ("", []),
    "banned_strings": ([],),
    "ban_eos_token": (False,),
    "add_bos_token": (True,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "repetition_decay": (0,),
    "penalty_alpha": (0,),
    "early_stopping": (False,),
    "min_length": (0,),
    "watermark": (False,),
    "preset": ("", "None"),
    "character": ("",),
    "image_data": ([],),
    "reasoning_budget": (-1,),
    "thinking_budget": (-1,),
    "speculative": (),
}
# Fields that change answers where an endpoint has them; elsewhere they are refused, except at these values.
_OF_ANSWERS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "chat_template_kwargs",
         "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "assistant_prefill",
         "image", "video", "input_audio"),
        (),
    ),
    **dict.fromkeys(
        ("include_stop_str_in_output", "continue_final_message", "prefix", "partial", "receipt", "prefill"), (False,)
    ),
    "repeat_last_n": (-1,), "top_logprobs": (0,), "min_tokens": (0,), "best_of": (1,),
    "stop": ([], ""), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({}, []), "ignore_eos": (False,), "n": (1,), "logprobs": (False,), "tools": ([],),
    "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "format": ("",),
    "skip_special_tokens": (True,), "add_special_tokens": (True, False), "add_generation_prompt": (True,),
    "parallel_tool_calls": (True, False), "suffix": ("",), "raw": (False,), "images": ([],),
}  # fmt: skip
CHANGING: Mapping[str, tuple[object, ...]] = {
    **_OF_ANSWERS, **COMPLETION_NOT_YET, **CHAT_NOT_YET, **VLLM_NOT_YET, **LLAMA_NOT_YET
}  # fmt: skip
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
    **dict.fromkeys(
        ("prefix", "partial", "prefill", "assistant_prefill"),
        ": end the messages with the assistant's, and set continue_final_message",
    ),
    "best_of": "; n takes a number of answers",
    **dict.fromkeys(_RANGES, "; repeat_last_n takes it for all penalties"),
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget", "reasoning_budget"),
        '; chat_template_kwargs {"enable_thinking": false} turns thoughts off',
    ),
    **dict.fromkeys(("image", "video", "input_audio", "images"), ": messages are text"),
    "functions": "; tools takes them",
    "function_call": "; tool_choice takes it",
    "grammar": "; structured_outputs takes it",
    "json_schema": "; response_format or structured_outputs takes it",
    **dict.fromkeys(("prompt_embeds", "resume_token_ids"), "; /v1/completions takes it"),
}
