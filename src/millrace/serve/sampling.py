"""From a request's fields to SamplingParams; what was left out stays for the engine to decide, save for the seed."""

from dataclasses import replace

from millrace.errors import RequestError
from millrace.runtime.params import MAX_LOGPROBS, SamplingParams
from millrace.serve.protocol import ChatRequest, CompletionRequest, SamplingFields


def chat_params(asked: ChatRequest) -> SamplingParams:
    """raises RequestError naming the field as the client wrote it"""
    max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    n_top = asked.top_logprobs
    if n_top is not None and not asked.logprobs:
        raise RequestError(
            "top_logprobs is set, but logprobs is not", "both", "set logprobs to true", param="top_logprobs"
        )
    if n_top is not None and not 0 <= n_top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {n_top}", f"an integer from 0 to {MAX_LOGPROBS}", "change top_logprobs", "top_logprobs"
        )
    try:
        return _params(asked, max_tokens, (n_top or 0) if asked.logprobs else None)
    except RequestError as error:
        if error.param == "max_tokens" and asked.max_tokens is None:
            what, mend = (s.replace("max_tokens", "max_completion_tokens") for s in (error.what, error.mend))
            raise RequestError(what, error.expected, mend, "max_completion_tokens") from None
        raise


def completion_params(asked: CompletionRequest) -> SamplingParams:
    """raises RequestError naming the field"""
    n = 1 if asked.n is None else asked.n
    if asked.best_of is not None and asked.best_of != n:
        raise RequestError(
            f"best_of is {asked.best_of} and n is {n}", "best_of equal to n", "leave best_of out", param="best_of"
        )
    max_tokens = 1 if asked.echo and asked.max_tokens == 0 else asked.max_tokens  # `completions` leaves it out
    params = _params(asked, max_tokens, asked.logprobs)
    return replace(params, prompt_logprobs=asked.logprobs) if asked.echo else params


def _params(asked: SamplingFields, max_tokens: int | None, n_top: int | None) -> SamplingParams:
    if asked.stream_options is not None and not asked.stream:
        raise RequestError(
            "stream_options is set, but stream is not", "both", "set stream to true", param="stream_options"
        )
    return SamplingParams(
        n=1 if asked.n is None else asked.n,
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens or 0,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed,
        stop=() if asked.stop is None else asked.stop if isinstance(asked.stop, str) else tuple(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=bool(asked.ignore_eos),
        logit_bias=asked.logit_bias or {},
        logprobs=n_top,
        include_stop_str_in_output=bool(asked.include_stop_str_in_output),
        skip_special_tokens=asked.skip_special_tokens is not False,
    )
