"""Other libraries' names on `LLM`: accepted if the meaning is the same, otherwise refused with an alternative.

source: vllm.LLM with its EngineArgs, methods and SamplingParams, vLLM 0.11; a few of llama-cpp-python's Llama.
"""

from collections.abc import Mapping
from typing import Any

from millrace.errors import ConfigError, close_matches, nearest

SAME = {
    "max_model_len": "max_context", "max_num_seqs": "max_batch", "n_ctx": "max_context", "n_threads": "threads",
    "enable_prefix_caching": "prefix_cache",
}  # fmt: skip
_DTYPES = {
    "auto": None, "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
}  # fmt: skip
_KV_DTYPES = {"auto": None, "bfloat16": "bf16", "float32": "fp32", "fp8_e4m3": "fp8"}
# Name -> the values that match the actual behavior, and what to use for other values.
_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((1,), "threads=, for the cores of this machine"),
    "pipeline_parallel_size": ((1,), "1: the whole model runs in this process"),
    "data_parallel_size": ((1,), "one LLM in each process"),
    "trust_remote_code": ((False,), "a model of your own, written as in examples/own_model.py"),
    "quantization": (
        (None,), 'precision="w8a8" or another of fp32, bf16, w8a8, w8a16, w4a8, w4a16, fp8a16; on a GPU also fp8'
    ),
    "gpu_memory_utilization": ((), 'kv_memory="4G", the memory of the KV cache on this machine'),
    "kv_cache_memory_bytes": ((), "kv_memory="),
    "swap_space": ((0,), "kv_tier=, a file for KV pages that memory has no room for, or kv_memory=, for more room"),
    "cpu_offload_gb": ((0,), "nothing: the weights are in this machine's memory already"),
    "enforce_eager": ((False, True, None), "False: there are no CUDA graphs to do without"),
    "max_num_batched_tokens": ((None,), "max_batch=, for fewer sequences at a time; steps have 512 tokens"),
    "enable_chunked_prefill": ((None, True), "True: prompts are always computed in chunks"),
    "disable_log_stats": ((True, False, None), "True: an LLM logs nothing"),
    "seed": ((None, 0), "SamplingParams(seed=...), which gives the same answer in any batch"),
    "revision": ((None,), 'the model as "org/name@revision"'),
    "tokenizer": ((None,), "a checkpoint folder that holds the tokenizer's files"),
    "tokenizer_mode": (("auto",), "a checkpoint folder that holds the tokenizer's files"),
    "skip_tokenizer_init": ((False,), 'prompts as {"prompt_token_ids": [...]}; text is made all the same'),
    "load_format": (("auto", "safetensors", "gguf"), "a checkpoint in safetensors or GGUF; for dummy weights "
                    "random_weights=True, on a GPU"),
    "download_dir": ((None,), "the environment variable HF_HOME"),
    "hf_token": ((None,), "the environment variable HF_TOKEN"),
    "block_size": ((None, 64), "KV pages have 64 tokens"),
    "n_gpu_layers": ((0,), 'device="cuda", for a whole model on a GPU'),
    "task": (("auto", "generate", "embed", "embedding", None), "generate, or embed for an encoder of sentences"),
    "runner": (("auto", "generate", "pooling"), "generate, or pooling for an encoder of sentences"),
    "convert": (("auto", "none", "embed"), "another library for this: a model does here what it was made for"),
    "hf_overrides": ((None, {}), "a copy of the checkpoint with another config.json"),
    "enable_lora": ((None, False), "a checkpoint into which the adapter is merged"),
    "limit_mm_per_prompt": ((None, {}), "prompts of text: images and sound are not read"),
    "speculative_config": ((None,), "None: nothing is drafted"),
    "max_seq_len_to_capture": ((None,), "None: there are no CUDA graphs"),
    "verbose": ((False, True), "False: an LLM logs nothing"),
}  # fmt: skip
# The same for arguments of calls.
_CALL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "lora_request": ((None,), "a checkpoint into which the adapter is merged"),
    "priority": ((None,), "one call after the other: the prompts of a call are answered in their order"),
    "prompt_token_ids": ((None,), 'prompts=[{"prompt_token_ids": [...]}]'),
    "tokenization_kwargs": ((None, {}), 'prompts as {"prompt_token_ids": [...]}'),
    "truncate_prompt_tokens": ((None,), 'a prompt {"prompt_token_ids": ids[-n:]}'),
    "tool_choice": ((None, "auto"), "millrace serve, which holds an answer to calls"),
    "documents": ((None, []), "chat_template_kwargs=, where the template knows them"),
    "chat_template": ((None,), "a checkpoint with this template, or generate() with the rendered prompt"),
    "chat_template_content_format": (("auto", "string", "openai"), '"auto": the template decides'),
    "continue_final_message": ((None, False), "generate() with the rendered prompt"),
    "pooling_params": ((None,), "the model as it is: its checkpoint says how vectors are made of texts"),
    "mm_processor_kwargs": ((None, {}), "messages of text: images and sound are not read"),
}  # fmt: skip
# Methods and properties, and what to use instead.
_METHODS: Mapping[str, str] = {
    "encode": "llm.tokenizer.encode() for token ids, and an encoder's embed() for vectors",
    **dict.fromkeys(("score", "classify", "reward"), "generate() with logprobs=, or another library"),
    "beam_search": "generate() with SamplingParams(n=...) and a temperature: there is no beam search",
    "generate_async": "astream(), for an answer as it grows",
    "create_completion": "generate()", "create_chat_completion": "chat()",
    "tokenize": "llm.tokenizer.encode(text)", "detokenize": "llm.tokenizer.decode(ids)",
    **dict.fromkeys(("sleep", "wake_up"), "close(), and a new LLM: a built engine is open in about a second"),
    **dict.fromkeys(("shutdown", "reset"), "close()"),
    **dict.fromkeys(("start_profile", "stop_profile"), "millrace inspect MODEL --tactics, in a shell"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "a model of your own, written as in examples/own_model.py"),
    "get_metrics": "millrace serve, whose /metrics has them",
    "llm_engine": "generate(), chat() and astream(): the engine is no part of the interface",
    "set_tokenizer": "a checkpoint folder that holds the tokenizer's files",
    "from_engine_args": "LLM(model, ...) with the same names",
}  # fmt: skip
_ENCODERS_METHODS: Mapping[str, str] = {
    **_METHODS,
    "encode": "embed()",
    "score": "embed() for both texts: the product of their vectors is their similarity, where they have the length 1",
    **dict.fromkeys(("classify", "reward"), "embed(), and a classifier of your own on its vectors"),
    "beam_search": "a model that generates text",
    **dict.fromkeys(("generate_async", "create_completion", "create_chat_completion"), "a model that generates text"),
    "llm_engine": "embed(): the engine is no part of the interface",
}  # fmt: skip
VALID_NAMES = frozenset({"dtype", *SAME, *_NEUTRAL})


class NoSuchMethodError(ConfigError, AttributeError):
    """Raised for another library's method; an AttributeError, so that `hasattr` works."""


def no_attribute(owner: object, name: str, can: str, *, encoder: bool) -> AttributeError:
    """Return the error for `__getattr__`. can: the methods that the owner has"""
    methods = _ENCODERS_METHODS if encoder else _METHODS
    if name in methods:
        return NoSuchMethodError(f'this LLM has no "{name}"', can, f"use {methods[name]}")
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)


def asks_for_embeddings(arguments: Mapping[str, object]) -> bool | None:
    """Whether the settings request an encoder; None: the model decides."""
    tasks = {arguments.get(name) for name in ("task", "runner", "convert")}
    if tasks & {"embed", "embedding", "pooling"}:
        return True
    return False if "generate" in tasks else None


def check_call(
    method: str, arguments: Mapping[str, object], valid_names: frozenset[str], sampling: frozenset[str]
) -> None:
    """Check the arguments of a call other than `valid_names`. raises ConfigError, with what to use

    sampling: the names of SamplingParams
    """
    for name, value in arguments.items():
        if name in _CALL:
            _check_neutral(name, value, _CALL)
        elif name in sampling:
            raise ConfigError(
                f"{method}() has no argument {name}: it belongs to the sampling parameters",
                f"{method}(..., SamplingParams({name}=...))", f"write SamplingParams({name}=...)",
            )  # fmt: skip
        else:
            meant, near = close_matches(name, valid_names), nearest(name, valid_names)
            fix = f"write {meant}=" if meant else f"leave it out; help(LLM.{method}) says what there is"
            raise ConfigError(f'{method}() has no argument "{name}"', near, fix)


def as_given(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return our name of a setting -> the name that the caller used, if different."""
    other = {**SAME, "dtype": "precision"}
    return {other[name]: name for name, value in arguments.items() if name in other and value is not None}


def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments under our names. raises ConfigError for an unsupported value, or a name given twice"""
    ours: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _NEUTRAL:
            _check_neutral(name, value, _NEUTRAL)
        elif name == "device" and value in (None, "auto"):
            continue
        elif name == "dtype":
            _add(
                ours,
                arguments,
                name,
                "precision",
                _precision(value, arguments.get("device") not in (None, "auto", "cpu")),
            )
        elif name == "kv_cache_dtype" and value in _KV_DTYPES:
            ours[name] = _KV_DTYPES[value]
        else:
            _add(ours, arguments, name, SAME.get(name, name), value)
    return ours


def _add(ours: dict[str, Any], arguments: Mapping[str, Any], name: str, own: str, value: Any) -> None:
    if value is None:  # not set; our own names are passed on, so that their checks see them
        if own == name:
            ours.setdefault(own, None)
        return
    other = next((n for n in arguments if n != name and SAME.get(n, n) == own and arguments[n] is not None), None)
    if other is not None:
        fix = f"leave {name if other == own else other} out"
        raise ConfigError(f"{name} and {other} are both given", "one of them: they mean the same", fix)
    ours[own] = value


def _precision(dtype: object, on_gpu: bool) -> str | None:
    """Return the precision for vLLM's `dtype`: a name, or a torch.dtype, which prints as "torch.bfloat16"."""
    name = str(dtype).removeprefix("torch.")
    if name in _DTYPES and (on_gpu or _DTYPES[name] != "fp16"):
        return _DTYPES[name]
    fix = "float16 is for a GPU: here bfloat16 is as small, float32 exact" if name in ("float16", "half") else ""
    raise ConfigError(f"dtype is {dtype!r}", f"auto, float32 or bfloat16{', or float16' if on_gpu else ''}",
                      fix or "precision= has the integer formats")  # fmt: skip


def _check_neutral(name: str, value: object, table: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    neutral, instead = table[name]
    if not any(type(value) is type(v) and value == v for v in neutral):
        allowed = " or ".join(map(repr, neutral)) or "nothing by that name"
        raise ConfigError(f"{name} is {value!r:.200}, which this LLM does not have", allowed, f"use {instead}")
