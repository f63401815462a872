"""Reads `generation_config.json`: the authors' sampling defaults, used if a request does not set them."""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.checkpoint.config.config_reader import token_ids
from millrace.errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"
ORIGIN = "millrace_sampling_of"  # source of the values, if they are not the authors'
_USED = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id", ORIGIN)
# llama.cpp's sampling defaults, which authors of GGUF files assume; at temperature 1 over the whole vocabulary, a small
# quantized model drifts into nonsense. source: common/common.h, 2026
LLAMA_CPP: Mapping[str, object] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, ORIGIN: "llama.cpp",
}  # fmt: skip
# Keys that do not affect the chosen token, that belong to the request (lengths), or to other kinds of models.
_HARMLESS_TEXT = """
    _from_model_config transformers_version bos_token_id pad_token_id decoder_start_token_id use_cache
    cache_implementation return_dict_in_generate output_attentions output_hidden_states output_scores output_logits
    max_length max_new_tokens chat_format trust_remote_code assistant_temperature num_assistant_tokens
    num_assistant_tokens_schedule is_assistant assistant_confidence_threshold assistant_early_exit
    prompt_lookup_num_tokens max_matching_ngram_size target_lookbehind assistant_lookbehind disable_compile
    compile_config token_healing prefill_chunk_size remove_invalid_values renormalize_logits
"""
_HARMLESS = frozenset(_HARMLESS_TEXT.split())
# Keys without effect at these values; other values are reported to the user, because they are not supported.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "guidance_scale": (1,),
    "low_memory": (False,),
    "dola_layers": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults of a model; None: not set. temperature 0 is greedy; top_k 0 is off.

    origin: "" if the values are the model's own, otherwise their source
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # to be shown to the user
    origin: str = ""

    @property
    def sampling(self) -> dict[str, float | int]:
        """Return the values that are set, by their names in a request."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def read_generation(raw: Mapping[str, object]) -> GenerationDefaults:
    """Parse generation_config.json; unsupported settings become notes. raises CheckpointError

    `do_sample: false` is temperature 0; a missing do_sample means nothing (transformers would be greedy, but all common
    servers sample).
    """
    do_sample = raw.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _wrong("do_sample", do_sample, "true or false")
    temperature = _number(raw, "temperature", 0.0, 100.0)
    return GenerationDefaults(
        temperature=0.0 if do_sample is False else temperature,
        top_p=_number(raw, "top_p", 1e-9, 1.0),
        top_k=_top_k(raw),
        min_p=_number(raw, "min_p", 0.0, 1.0),
        repetition_penalty=_number(raw, "repetition_penalty", 1e-9, 100.0),
        eos_token_ids=token_ids("generation_config.json", "eos_token_id", raw.get("eos_token_id")),
        origin=str(raw.get(ORIGIN) or "")[:64],
        notes=tuple(
            f"generation_config.json: {key} = {value} is not supported and not used"
            for key, value in raw.items()
            if key not in _USED and key not in _HARMLESS and value is not None and value not in _NEUTRAL.get(key, ())
        ),
    )


def _number(raw: Mapping[str, object], key: str, low: float, high: float) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(key, value, "a number or null")
    if not low <= value <= high:
        raise _wrong(key, value, f"from {low:g} to {high:g}")
    return float(value)


def _top_k(raw: Mapping[str, object]) -> int | None:
    value = raw.get("top_k")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
        raise _wrong("top_k", value, "an integer from 0 (off) to 2147483647")
    return max(value, 0)


def _wrong(key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"generation_config.json: {key} is {value!r}", expected, f"correct {key}, or remove it")
