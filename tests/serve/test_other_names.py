"""Fields as other servers' clients name them: honoured, ignored or refused by one rule, in every protocol."""

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.serve.http.unknown_fields import closest_name
from millrace.serve.llm.reasoning import ThinkingSwitch
from millrace.serve.llm.request_decoding import read_request
from millrace.serve.llm.request_types import ChatRequest
from millrace.serve.llm.unsupported_fields import IGNORED
from tests.serve.support import Fake, Running, serving_with
from tests.serve.test_ignored_fields import ASK, CHAT, GENERATE, MESSAGES, OLLAMA_CHAT, RESPONSES, ask
from tests.serve.thinkers import TEMPLATE, Thinker, thinker_of

COMPLETIONS = "/v1/completions"
# What SillyTavern's text completion sends by default: each sampler by all of its names, most of them off.
SILLY_TAVERN: dict[str, Any] = {
    "prompt": "a", "max_new_tokens": 2, "max_tokens": 2, "temperature": 0.7, "top_p": 0.5, "typical_p": 1,
    "typical": 1, "sampler_seed": -1, "seed": -1, "min_p": 0, "repetition_penalty": 1.2, "rep_pen": 1.2,
    "repetition_penalty_range": 0, "rep_pen_range": 0, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 40,
    "skew": 0, "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1,
    "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": "[]",
    "dry_penalty_last_n": 0, "max_tokens_second": 0, "sampler_priority": ["temperature", "top_k"],
    "samplers": ["top_k"], "ban_eos_token": False, "skip_special_tokens": True, "top_a": 0, "tfs": 1,
    "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [],
    "api_type": "generic", "api_server": "http://x", "xtc_threshold": 0.1, "xtc_probability": 0, "nsigma": 0,
    "top_n_sigma": 0, "min_keep": 0, "adaptive_target": -0.01, "adaptive_decay": 0.9, "temperature_last": True,
    "guidance_scale": 1, "negative_prompt": "", "grammar_string": "", "do_sample": True, "early_stopping": False,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "penalty_alpha": 0, "num_beams": 1, "length_penalty": 1, "min_length": 0,
    "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "dynamic_temperature": False, "dynatemp_low": 1,
    "dynatemp_high": 1, "dynatemp_range": 0, "dynatemp_exponent": 1, "stop": [], "stopping_strings": [],
    "truncation_length": 8192, "json_schema": None, "speculative_ngram": False, "include_reasoning": True,
    "logit_bias": [], "n": 1, "ignore_eos": False, "spaces_between_special_tokens": True,
}  # fmt: skip


def test_sillytaverns_request(server: Running) -> None:
    reply = ask(server, COMPLETIONS, **SILLY_TAVERN)
    assert reply.status_code == 200, reply.text
    told = set(reply.headers["x-millrace-ignored"].split(", "))
    assert {"temperature_last", "rep_pen", "max_new_tokens", "adaptive_decay", "sampler_priority"} <= told


IGNORED_HERE: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {name: 1}, name) for name in ("n_ctx", "num_gqa", "style", "speed", "topic", "num", "top", "min_temp")),
    (CHAT, {"top_n": 3}, "top_n"),
    (OLLAMA_CHAT, {"options": {"num_predict": 2, "num_gqa": 8, "n_ctx": 9}}, "options.n_ctx, options.num_gqa"),
    (OLLAMA_CHAT, {"options": {"num_predict": 2, "speed": 1, "top": 1}}, "options.speed, options.top"),
    (OLLAMA_CHAT, {"style": "x", "topic": "y", "num_gqa": 8}, "num_gqa, style, topic"),
    (MESSAGES, {"style": "x", "top": 1, "n_ctx": 9, "image": ""}, "image, n_ctx, style, top"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"banned_string": ["a"]}, "banned_string"),
    (CHAT, {"temperature_last": True, "temperature": 0.5}, "temperature_last"),
    (CHAT, {"reasoning_effort": "low", "reasoning": {"summary": "auto"}}, "reasoning, reasoning_effort"),
    (RESPONSES, {"reasoning_effort": "none", "think": False}, "reasoning_effort, think"),
    (COMPLETIONS, {"reasoning_effort": "none"}, "reasoning_effort"),
]  # fmt: skip


@pytest.mark.parametrize("path, fields, told", IGNORED_HERE, ids=[f"{path} {told}" for path, _, told in IGNORED_HERE])
def test_names_of_other_programs_are_ignored(server: Running, path: str, fields: dict[str, Any], told: str) -> None:
    """Also those like a field of ours that does nothing, or is refused."""
    reply = ask(server, path, **fields)
    assert reply.status_code == 200 and reply.headers.get("x-millrace-ignored") == told, reply.text


# Values that ask for what happens anyway, by whatever name.
NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"assistant_prefill": "", "prefix": False, "partial": False, "best_of": 1, "rep_pen": 1}),
    (CHAT, {"stop_sequences": [], "stopping_strings": [], "system": "", "grammar": "", "chat_template": ""}),
    (CHAT, {"mirostat_mode": 0, "adaptive_target": -0.01, "penalize_nl": True, "repetition_penalty": 1.2}),
    (CHAT, {"n": 2, "best_of": 2}), (CHAT, {"extra_body": {}, "image": "", "freq_pen": 0}),
    (RESPONSES, {"prefix": "", "stop": [], "repetition_penalty": 1}),
    (MESSAGES, {"stop": [], "rep_pen": 1, "prefill": "", "best_of": 1}),
    (OLLAMA_CHAT, {"options": {"rope_frequency_base": 0, "rope_frequency_scale": 1.0, "mirostat_mode": 0}}),
]  # fmt: skip


@pytest.mark.parametrize("path, fields", NEUTRAL, ids=[f"{path} {list(fields)}" for path, fields in NEUTRAL])
def test_neutral_values_are_taken_by_every_name(server: Running, path: str, fields: dict[str, Any]) -> None:
    reply = ask(server, path, **fields)
    assert reply.status_code == 200, reply.text


def test_a_neutral_value_overrides_the_models_own_default() -> None:
    """rep_pen 1 is repetition_penalty 1, also where the model's generation_config.json says another."""
    asked, unknown = read_request(b'{"messages": [], "rep_pen": 1, "freqPen": 0}', ChatRequest)
    assert asked.repetition_penalty == 1 and asked.frequency_penalty is None and unknown == ("freqPen",)


REFUSED_BY_NAME: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temp": 0.0}, 'did you mean "temperature"?'), (MESSAGES, {"temp": 0.5}, 'did you mean "temperature"?'),
    (OLLAMA_CHAT, {"options": {"temp": 0.5}}, 'did you mean "options.temperature"?'),
    (CHAT, {"topP": 0.5}, 'did you mean "top_p"?'), (CHAT, {"maxOutputTokens": 5}, 'did you mean "max_tokens"?'),
    (CHAT, {"stopSequences": ["a"]}, 'did you mean "stop"?'), (CHAT, {"candidateCount": 2}, 'did you mean "n"?'),
    (CHAT, {"rep_pen": 1.3}, 'did you mean "repetition_penalty"?'),
    (CHAT, {"mirostat_mode": 2}, "mirostat_mode is not supported yet"),
    (OLLAMA_CHAT, {"options": {"mirostat_mode": 2}}, "options.mirostat_mode is not supported yet"),
    (OLLAMA_CHAT, {"options": {"rope_frequency_scale": 0.5}}, "options.rope_frequency_scale is not supported yet"),
    (OLLAMA_CHAT, {"options": {"rope_frequency_base": 5e5}}, "options.rope_frequency_base is not supported yet"),
    (CHAT, {"adaptive_target": 0.5}, "or send a number below 0"),
    (CHAT, {"assistant_prefill": "Sure"}, "set continue_final_message"), (CHAT, {"prefix": "Sure"}, "continue_final"),
    (CHAT, {"best_of": 3}, "n takes a number of answers"), (CHAT, {"image": "data:"}, "messages are text"),
    (CHAT, {"thinking_budget": 0}, '{"enable_thinking": false}'),
    (MESSAGES, {"reasoning_effort": "none"}, 'did you mean "thinking"?'),
    (MESSAGES, {"think": False}, 'did you mean "thinking"?'),
    (OLLAMA_CHAT, {"enable_thinking": False}, 'did you mean "think"?'),
    (CHAT, {"messages": [{**ASK[0], "prefix": True}]}, "messages[0].prefix is true"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "partial": True}, *ASK]}, "messages[0].partial is true"),
    (CHAT, {"think": True, "reasoning_effort": "none"}, "think enables reasoning, and reasoning_effort disables it"),
]  # fmt: skip


@pytest.mark.parametrize(
    "path, fields, says",
    REFUSED_BY_NAME,
    ids=[f"{path} {says}" for path, _, says in REFUSED_BY_NAME],
)
def test_what_would_change_the_answer_is_refused_by_every_name(
    server: Running, path: str, fields: dict[str, Any], says: str
) -> None:
    reply = ask(server, path, **fields)
    told = reply.json()["error"]
    message = told if isinstance(told, str) else told["message"]
    assert reply.status_code == 400 and says in message, reply.text
    assert "best_of" not in fields or "did you mean" not in message


def test_a_suggestion_is_near_and_does_something() -> None:
    ours = ["top_k", "top_p", "stop", "seed", "n", "tools", "temperature", "store"]
    near = {"top_pp": "top_p", "topk": "top_k", "tool": "tools", "temperatrue": "temperature", "seeds": "seed"}
    assert {name: closest_name(name, ours) for name in near} == near
    assert not [name for name in ("topic", "style", "num", "m", "steep") if closest_name(name, ours)]
    assert {"speed", "top", "num", "style"} <= IGNORED


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_the_last_message_is_gone_on_with_by_every_name(server: Running, name: str) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The mill"}]
    marked = [*ASK, {"role": "assistant", "content": "The mill", name: True}]
    meant = ask(server, CHAT, messages=begun, continue_final_message=True, seed=1, max_tokens=8).json()
    said = ask(server, CHAT, messages=marked, seed=1, max_tokens=8)
    assert "x-millrace-ignored" not in said.headers
    assert said.json()["choices"] == meant["choices"] and said.json()["usage"] == {
        **meant["usage"], "prompt_tokens_details": said.json()["usage"]["prompt_tokens_details"]
    }  # fmt: skip
    over_responses = ask(server, RESPONSES, input=marked, seed=1, max_output_tokens=8)
    assert over_responses.json()["usage"]["input_tokens"] == meant["usage"]["prompt_tokens"], over_responses.text
    more = {"previous_response_id": over_responses.json()["id"], "input": "And then?"}
    assert ask(server, RESPONSES, **more).status_code == 200, "what is stored is no prefix any more"
    not_last = ask(server, RESPONSES, input=[marked[-1], *ASK])
    assert not_last.status_code == 400 and f"input[0].{name} is true" in not_last.text
    for more, says in (({"continue_final_message": False}, name), ({"add_generation_prompt": True}, name)):
        assert says in ask(server, CHAT, messages=marked, **more).json()["error"]["message"]


# ------------------------------------------------------------------ thoughts


@pytest.fixture(scope="module")
def thinker() -> Iterator[Thinker]:
    yield from thinker_of("writes <think>")


OFF: list[tuple[str, dict[str, Any]]] = [
    *(
        (path, fields)
        for path in (CHAT, RESPONSES)
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, {"think": False},
            {"thinking": {"type": "disabled"}}, {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"},
            {"reasoning": {"enabled": False}}, {"thinking": False},
        )
        if path == CHAT or fields.get("thinking") is not False
    ),
    (MESSAGES, {"thinking": {"type": "disabled"}}), (OLLAMA_CHAT, {"think": False}), (GENERATE, {"think": False}),
]  # fmt: skip


@pytest.mark.parametrize("path, fields", OFF, ids=[f"{path} {fields}" for path, fields in OFF])
def test_thoughts_are_off_by_every_name(thinker: Thinker, path: str, fields: dict[str, Any]) -> None:
    thinker.executor.says, thinker.executor.opened = "Yes.", "<think>\n\n</think>\n\n"
    reply = ask(thinker.served, path, **fields)
    assert reply.status_code == 200 and "x-millrace-ignored" not in reply.headers, reply.text
    assert thinker.executor.prompt.endswith("assistant\n<think>\n\n</think>\n\n")


def test_thoughts_that_cannot_be_off_are_refused_by_name() -> None:
    always = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}"
    with serving_with(Fake(template=always)) as server:
        for path, fields, name in (
            (CHAT, {"reasoning_effort": "none"}, "reasoning_effort"), (OLLAMA_CHAT, {"think": False}, "think"),
            (MESSAGES, {"thinking": {"type": "disabled"}}, "thinking"),
        ):  # fmt: skip
            reply = ask(server, path, **fields)
            assert reply.status_code == 400 and f"{name} disables reasoning" in reply.text, reply.text
        on = ask(server, MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024})
        assert on.status_code == 200, "it thinks anyway"


def test_the_variable_of_thoughts_is_the_templates_own() -> None:
    def variables(source: str) -> tuple[str, ...]:
        return ThinkingSwitch(source)._variables

    assert variables(TEMPLATE) == ("enable_thinking",)
    assert variables("{% if thinking is defined and thinking %}<think>{% endif %}</think>") == ("thinking",)
    assert variables("{{ m.thinking }} thinking {{ 'enable_thinking' }}</think>") == ()
