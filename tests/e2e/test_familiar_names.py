"""Names that users bring from vLLM and llama-cpp-python: taken where the meaning is the same, else told what to use."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from millrace import LLM, MillraceError, SamplingParams
from millrace.errors import RequestError

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", precision="w4a8", evaluate=False) as model:
        yield model


def test_vllms_names_are_taken(llm: LLM) -> None:
    same: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 4,
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "seed": 0,
    }
    with LLM("tiny", **same, tune=0, trust_remote_code=False, kv_cache_dtype="auto") as model:
        manifest = model._opened.engine.manifest
        assert (manifest.max_context, manifest.max_sequences) == (512, 4)
        assert manifest.precision["default"] == "fp32"


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size is 2", "threads="]),
        ({"gpu_memory_utilization": 0.9}, ["gpu_memory_utilization is 0.9", 'kv_memory="4G"']),
        ({"quantization": "awq"}, ["quantization is 'awq'", "precision="]),
        ({"quantization": "fp8", "device": "cuda"}, ["quantization is 'fp8'", "on a GPU also fp8"]),
        ({"load_format": "dummy", "device": "cuda"}, ["load_format is 'dummy'", "random_weights=True"]),
        ({"trust_remote_code": True}, ["trust_remote_code is True", "own_model.py"]),
        ({"dtype": "float16"}, ["dtype is 'float16'", "bfloat16"]),
        ({"dtype": "bfloat16", "precision": "fp32"}, ["dtype and precision are both given"]),
        ({"dtype": "bfloat16", "precision": {"default": "fp32"}}, ["dtype and precision are both given"]),
        ({"max_model_len": 64, "max_context": 32}, ["max_model_len and max_context are both given"]),
        ({"max_model_len": 64, "n_ctx": 64}, ["max_model_len and n_ctx are both given"]),
        ({"max_modle_len": 64}, ['did you mean "max_model_len"?', "write max_model_len="]),
        # in the words of who asks: arguments, not flags
        ({"max_context": 10**6}, ["lower max_context"]),
        ({"max_model_len": 10**6}, ["lower max_model_len"]),
        ({"n_ctx": 10**6}, ["lower n_ctx"]),
        ({"kv_memory": "1k"}, ["kv_memory=1 KiB"]),
        ({"kv_memory": "1M", "max_model_len": 512}, ["kv_memory=1 MiB", "max_model_len="]),
        ({"device": "cuda"}, ["device cuda", "PyTorch"]),
        ({"task": "embed"}, ["tiny is a language model", "cannot embed()", "generate()"]),
        ({"runner": "pooling"}, ["tiny is a language model", "cannot embed()", "generate()"]),
        ({"task": "score"}, ["task is 'score'", "embed for an encoder"]),
        ({"hf_overrides": {"a": 1}}, ["hf_overrides is {'a': 1}", "config.json"]),
        ({"enable_lora": True}, ["enable_lora is True", "merged"]),
        ({"n_gpu_layers": -1}, ["n_gpu_layers is -1", 'device="cuda"']),
        ({"quux": 1}, ['no setting "quux"', "help(LLM)"]),
        ({"kv_memory": "1M"}, ["kv_memory=1 MiB", "max_context="]),
    ],
)
def test_what_cannot_be_says_what_to_use(given: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(MillraceError) as error:
        LLM("tiny", **given)
    assert all(f in str(error.value) for f in fragments), str(error.value)
    assert "--" not in str(error.value) and all("--" not in a for a in error.value.args if isinstance(a, str))


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ({"temprature": 1}, ['did you mean "temperature"?', "write temperature="]),
        ({"best_of": 4}, ['no parameter "best_of"', "to fix:   use n="]),
        ({"guided_decoding": None}, ["structured_outputs="]),
        ({"max_new_tokens": 16}, ["max_tokens="]),
        ({"flat_logprobs": True, "n": 2}, ['no parameter "flat_logprobs"']),
        ({"Q": 1}, ["one of: detokenize, frequency_penalty"]),
    ],
)
def test_unknown_sampling_parameters_are_named(given: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**given)
    assert all(f in str(error.value) for f in fragments), str(error.value)
    assert error.value.param == next(iter(given))


def test_what_asks_for_nothing_else_is_taken() -> None:
    neutral: dict[str, Any] = {"device": "cpu", "task": "generate", "runner": "generate", "hf_overrides": {}}
    with LLM(
        "tiny",
        **neutral,
        enable_lora=False,
        n_ctx=128,
        max_context=None,
        n_gpu_layers=0,
        precision="w4a8",
        tune=0,
        evaluate=False,
    ) as model:
        assert model._opened.engine.manifest.max_context == 128
        (one,) = model.generate("Once", GREEDY, lora_request=None)
        hello = [{"role": "user", "content": "Hello!"}]
        (two,) = model.chat(hello, GREEDY, add_generation_prompt=True, tools=None, chat_template=None)
        assert one.finished and two.finished
        (open_end,) = model.chat(
            hello, GREEDY, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": 0}
        )
        shorter = open_end.prompt_token_ids
        assert len(shorter) < len(two.prompt_token_ids) and two.prompt_token_ids[: len(shorter)] == shorter
        defaults = model.get_default_sampling_params()
        assert defaults == SamplingParams(temperature=0.7, top_p=0.95) and model.reset_prefix_cache() is True
        assert repr(model) == "<LLM tiny: w4a8, 128 tokens, 16 at a time>"
    assert repr(model) == "<LLM tiny: w4a8, 128 tokens, 16 at a time, closed>"


@pytest.mark.parametrize(
    ("name", "instead"),
    [("encode", "embed()"), ("score", "logprobs="), ("classify", "another library"),
     ("beam_search", "n="), ("create_chat_completion", "chat()"), ("llm_engine", "generate()")],
)  # fmt: skip
def test_methods_of_other_libraries_say_what_to_use(llm: LLM, name: str, instead: str) -> None:
    with pytest.raises(MillraceError) as error:
        getattr(llm, name)("Once")
    assert f'this LLM has no "{name}"' in str(error.value) and instead in error.value.fix
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'quux'"):
        llm.quux()


def test_arguments_of_calls_say_what_to_use(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt_token_ids": [[1, 2]]}, 'prompts=[{"prompt_token_ids"'),
        ({"prompts": "a", "lora_request": 1}, "merged"),
        ({"prompts": "a", "max_tokens": 5}, "SamplingParams(max_tokens=...)"),
        ({"prompts": "a", "use_tqmd": True}, 'did you mean "use_tqdm"?'),
        ({}, "prompts is of type NoneType"),
    ]
    for given, fragment in wrong:
        with pytest.raises(MillraceError) as error:
            llm.generate(**given)
        assert fragment in str(error.value)
    for extra, fragment in (
        ({"tools": [{}]}, "tools[0].type is None"),
        ({"temperature": 0}, "SamplingParams(temperature"),
    ):
        with pytest.raises(MillraceError) as error:
            llm.chat(hello, **extra)
        assert fragment in str(error.value)


def test_token_ids_without_their_text(llm: LLM) -> None:
    both = dataclasses.replace(GREEDY, stop="zzz")
    (choice,) = llm.generate("Once", both)[0].outputs
    (bare,) = llm.generate("Once", dataclasses.replace(both, detokenize=False))[0].outputs
    assert bare.token_ids == choice.token_ids and bare.text == "" != choice.text


def test_fixes_are_right_for_who_reads_them(llm: LLM) -> None:
    for prompt, params in (("a", SamplingParams(max_tokens=5000)), ("mill " * 5000, GREEDY)):
        with pytest.raises(RequestError) as error:
            llm.generate(prompt, params)
        assert "use the rest" not in str(error.value), "left out, it is 16 tokens"
        assert "serve" not in str(error.value) and "--" not in str(error.value)
