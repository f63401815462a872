"""`--model-impl transformers`: models that have no native implementation, beside transformers' own generation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from millrace import LLM, SamplingParams
from millrace.checkpoint.tokenizer.tokenizer import TOKENIZER_FILES, read_files
from millrace.checkpoint.tokenizer.tokenizer_files import make_tokenizer
from millrace.checkpoint.weights.safetensors import Tensors
from millrace.compile.resolve_model import BUNDLED
from millrace.engine.transformers.engine import _context, _kv_numbers, _largest_width, transformers_engine
from millrace.errors import CheckpointError, ConfigError, MillraceError
from tests.support.command_line import run_process

TINY = BUNDLED / "tiny"
VOCAB = json.loads((TINY / "config.json").read_text())["vocab_size"]
_IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=700, **_IDS)
    return transformers.GPT2LMHeadModel(config)


def _bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=48, n_layer=2, n_head=3, **_IDS))


def _gpt_neox() -> Any:
    config = transformers.GPTNeoXConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, max_position_embeddings=256,
        **_IDS,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def _mamba() -> Any:
    """Keeps a state, and continues with one token at a time only."""
    return transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, **_IDS))


def _gemma() -> Any:
    """Windows in every other layer, which long prompts pass."""
    config = transformers.Gemma2Config(
        hidden_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, sliding_window=24, max_position_embeddings=512, **_IDS,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2, "bloom": _bloom, "gpt_neox": _gpt_neox, "mamba": _mamba, "gemma2": _gemma,
}  # fmt: skip


def write_checkpoint(folder: Path, make: Callable[[], Any]) -> Any:
    """A checkpoint with random weights and the tokenizer of `tiny`; return the model."""
    torch.manual_seed(7)
    model = make().eval()
    for parameter in model.parameters():  # so that answers do not repeat one token
        parameter.data.mul_(4)
    model.save_pretrained(folder)
    for path in TINY.iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, folder / path.name)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = write_checkpoint(tmp_path, MODELS[name])
    draw = np.random.default_rng(1)
    prompts = [draw.integers(3, VOCAB, n).tolist() for n in (1, 5, 40, 90, 3)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    with LLM(tmp_path, model_impl="transformers", threads=1, max_batch=3, max_context=200) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            generated = model.generate(
                torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False
            )[0, len(prompt) :].tolist()  # fmt: skip
            logits = model(torch.tensor([[*prompt, *generated]])).logits[0].double()
        answer = output.outputs[0]
        assert list(answer.token_ids) == generated
        expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        assert answer.logprobs is not None
        for i, (token, logprobs) in enumerate(zip(generated, answer.logprobs, strict=True)):
            assert abs(logprobs[token].logprob - float(expected[i, token])) < 1e-3


def test_a_context_of_a_few_tokens(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gpt2)
    with LLM(tmp_path, model_impl="transformers", threads=1, max_context=4) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


def test_a_sequence_that_is_preempted_continues_with_its_tokens(tmp_path: Path) -> None:
    """Memory for 240 tokens, and three sequences of 110 that share it."""
    write_checkpoint(tmp_path, gpt2)
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (60, 61, 62)]
    params = SamplingParams(max_tokens=50, temperature=0.8, seed=5, ignore_eos=True)
    with LLM(tmp_path, model_impl="transformers", threads=1, max_context=120) as llm:
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    kv_bytes = 2 * 3 * 48 * 4 * 240  # keys and values of three layers, for 240 tokens
    with LLM(tmp_path, model_impl="transformers", threads=1, max_context=120, kv_memory=kv_bytes) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert together == alone


def test_bfloat16_is_taken_where_it_is_stored_or_asked_for(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "f32", gpt2)
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        model.to(dtype).save_pretrained(tmp_path / name)
        for path in (tmp_path / "f32").glob("tokenizer*"):
            shutil.copy(path, tmp_path / name / path.name)
    cases = (("f32", None, "fp32"), ("bf16", None, "bf16"), ("f32", "bf16", "bf16"), ("f16", None, "fp32"))
    for folder, precision, expected in cases:
        with LLM(tmp_path / folder, model_impl="transformers", threads=1, precision=precision) as llm:
            assert llm._opened.engine.manifest.precision == {"default": expected}
            assert len(llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_texts_end_with_the_tokens_of_all_files(tmp_path: Path) -> None:
    """As of a native engine: a tuned model may end its turns with a token that only its tokenizer names."""
    write_checkpoint(tmp_path, gpt2)

    def ids() -> list[int]:
        tensors = Tensors.open(tmp_path)
        return transformers_engine("m", tmp_path, tensors, "", max_context=64).manifest.eos_token_ids

    own = make_tokenizer(read_files(tmp_path, TOKENIZER_FILES), tmp_path, VOCAB).eos_token_id
    assert own is not None
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ids() == [7, 8, own]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    assert ids() == [own]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": 9}))
    assert ids() == [9, own]


def refusal(folder: Path, **settings: Any) -> MillraceError:
    with pytest.raises(MillraceError) as refused, LLM(folder, model_impl="transformers", **settings):
        pass
    return refused.value


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gpt2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"precision": "w4a8"}, "precision"), ({"isa": "avx2"}, "isa"), ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"max_context": 701}, "at most the model's 700"), ({"model_impl": "torch"}, "model_impl"),
    ]  # fmt: skip
    for settings, words in cases:
        with pytest.raises(ConfigError) as refused, LLM(tmp_path, **{"model_impl": "transformers", **settings}):
            pass
        assert words in str(refused.value), refused.value
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    assert isinstance(error := refusal(tmp_path), CheckpointError) and "no_such_type" in str(error)
    own_code = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config | own_code))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('it ran')")
    assert "is never run" in str(refusal(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
    assert "no causal language model" in str(refusal(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 4}))
    assert "12 tensors are missing: transformer.h.3" in str(refusal(tmp_path))


def test_a_checkpoint_without_a_native_implementation_says_what_runs_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gpt2)
    outcome = run_process(["generate", str(tmp_path), "Once"], tmp_path / "cache")
    outcome.assert_mistake("GPT2LMHeadModel", "--model-impl transformers")


@pytest.mark.nightly
def test_every_causal_type_of_transformers_has_sizes() -> None:
    types = list(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    n_read = 0
    for model_type in types:
        try:
            config = transformers.AutoConfig.for_model(model_type)
        except Exception:  # noqa: BLE001  some have no default configuration
            continue
        text = config.get_text_config(decoder=True)
        assert min(_kv_numbers(text), _context(text, None), _largest_width(text), text.vocab_size) > 0, model_type
        n_read += 1
    assert n_read > len(types) - 5
