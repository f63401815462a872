"""`from millrace import LLM, SamplingParams`: what a Python user types, with the bundled model."""

import asyncio
import copy
import dataclasses
import gc
import itertools
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from millrace import LLM, MillraceError, RequestOutput, SamplingParams
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import RequestError
from millrace.runtime.open_engine import RunningModel

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", precision="w4a8", evaluate=False) as model:
        yield model


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [choice.text for output in outputs for choice in output.outputs]


def test_every_way_to_write_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time")
    (answer,) = llm.generate("Once upon a time", GREEDY)
    assert answer.finished and answer.prompt == "Once upon a time" and answer.prompt_token_ids == ids
    (choice,) = answer.outputs
    assert len(choice.token_ids) == 24 and choice.finish_reason == "length" and choice.text
    for prompt in (["Once upon a time"], [{"prompt": "Once upon a time"}], [{"prompt_token_ids": ids}], [ids], ids):
        assert texts(llm.generate(prompt, GREEDY)) == [choice.text]
    assert llm.generate([], GREEDY) == []


def test_a_list_is_answered_in_order(llm: LLM) -> None:
    prompts = [f"Tom has {i} apples" for i in range(40)]  # more than run at a time
    alone = [texts(llm.generate(p, GREEDY))[0] for p in prompts[:5]]
    together = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in together] == prompts and texts(together)[:5] == alone


def test_params_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], each)] == [1, 5]
    with pytest.raises(RequestError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["a", "b", "c"], each)


def test_n_and_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=24, temperature=1.2, seed=5, ignore_eos=True)
    first, again = texts(llm.generate("The", params)), texts(llm.generate("The", params))
    assert first == again and len(set(first)) == 3


def test_ignore_eos(llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_id
    assert eos is not None
    biased = {eos: 100.0}
    (ended,) = llm.generate("The", SamplingParams(max_tokens=8, logit_bias=biased))
    (went_on,) = llm.generate("The", SamplingParams(max_tokens=8, logit_bias=biased, ignore_eos=True))
    assert ended.outputs[0].finish_reason == "stop" and len(ended.outputs[0].token_ids) == 1
    assert went_on.outputs[0].finish_reason == "length" and len(went_on.outputs[0].token_ids) == 8


def test_chat_is_the_template_s_prompt(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Who are you?"}]
    (one,) = llm.chat(hello, GREEDY)
    two = llm.chat([hello, [*hello, {"role": "assistant", "content": "A mill."}, *hello]], GREEDY)
    assert len(two) == 2 and two[0].outputs[0].text == one.outputs[0].text
    by_hand = llm.generate("<|bos|><|user|>Who are you?<|end|><|assistant|>", GREEDY)
    assert len(by_hand[0].prompt_token_ids) - len(one.prompt_token_ids) in (
        0,
        1,
    )  # encoding may put one <|bos|> in front
    assert two[1].prompt_token_ids[: len(one.prompt_token_ids)] == one.prompt_token_ids


def test_astream_grows_to_the_answer(llm: LLM) -> None:
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

    async def collect() -> list[str]:
        return [output.outputs[0].text async for output in llm.astream("Once upon a time", long)]

    async def leave_early() -> None:
        async for _ in llm.astream("Once upon a time", SamplingParams(max_tokens=1000, ignore_eos=True)):
            break

    for _ in range(2):  # one event loop after the other
        grown = asyncio.run(collect())
        assert len(grown) > 3 and all(b.startswith(a) for a, b in itertools.pairwise(grown))
        assert grown[-1] == texts(llm.generate("Once upon a time", long))[0]
        asyncio.run(leave_early())


def test_streams_and_lists_side_by_side(llm: LLM) -> None:
    """Three streams of one event loop, and threads that want whole answers meanwhile: all as if alone."""
    params = [SamplingParams(max_tokens=60, seed=i, temperature=1, ignore_eos=True) for i in range(6)]
    alone = [texts(llm.generate("Once", p))[0] for p in params]

    async def stream(one: SamplingParams) -> str:
        return [output.outputs[0].text async for output in llm.astream("Once", one)][-1]

    async def together() -> list[str]:
        threads = [asyncio.to_thread(lambda p=p: texts(llm.generate("Once", p))[0]) for p in params[3:]]  # type: ignore[misc]
        return await asyncio.gather(*map(stream, params[:3]), *threads)

    assert asyncio.run(together()) == alone


def test_threads_share_an_engine_without_a_thread_of_its_own() -> None:
    with LLM("tiny", precision="w4a8", evaluate=False) as model, ThreadPoolExecutor(3) as pool:
        params = [SamplingParams(max_tokens=100, seed=i, temperature=1, ignore_eos=True) for i in range(6)]
        together = list(pool.map(lambda p: texts(model.generate("Once", p))[0], params))
        assert together == [texts(model.generate("Once", p))[0] for p in params]


def test_forgetting_to_close_gives_the_memory_back() -> None:
    def once(stream: bool) -> int:
        model = LLM("tiny", precision="w4a8", evaluate=False)
        if stream:
            asyncio.run(anext(model.astream("The", GREEDY)))  # type: ignore[arg-type]
        model.generate("The", GREEDY)
        del model
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    n_threads = threading.active_count()
    first = [once(stream=i % 2 == 0) for i in range(4)][-1]
    assert [once(stream=i % 2 == 0) for i in range(6)][-1] - first < 10 * 2**20
    assert threading.active_count() <= n_threads


MISTAKES = [
    ([5000], "prompt token 0 is 5000"),
    ("mill " * 5000, "maximum context length is 2048"),
    ({"text": "a"}, "a dict with text"),
    ({"prompt_token_ids": "a"}, "prompt_token_ids of type str"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "a dict with .*'prompt', 'prompt_token_ids'"),
    ({"prompt": "a", "cache_sald": "b"}, "a dict with cache_sald"),
    ([[1.5]], "not a list of token ids"),
    (["a", None], "of type NoneType"),
    ([["a"]], "not a list of token ids"),
    (5, "prompts is of type int"),
]


@pytest.mark.parametrize("prompt, names", MISTAKES, ids=[str(p)[:30] for p, _ in MISTAKES])
def test_a_wrong_prompt(llm: LLM, prompt: object, names: str) -> None:
    with pytest.raises(MillraceError, match=names):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
    assert texts(llm.generate("a", SamplingParams(max_tokens=1)))


def test_wrong_params(llm: LLM) -> None:
    for wrong in ({"max_tokens": 0}, {"temperature": float("nan")}, {"n": 0}, {"seed": 1.5}, {"stop": [""]}):
        (name,) = wrong
        with pytest.raises(RequestError, match=name):
            SamplingParams(**wrong)
    with pytest.raises(RequestError, match="at most 2048"):
        llm.generate("a", SamplingParams(max_tokens=2048))


@pytest.mark.parametrize(
    "wrong",
    [{"top_p": 1e-60}, {"repetition_penalty": 1e-60}, {"stop": 5}, {"stop_token_ids": 5}, {"logit_bias": [1]},
     {"ignore_eos": "no"}],
    ids=str,
)  # fmt: skip
def test_what_would_harm_others_is_refused(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(RequestError, match=name):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_none_means_none_of_these(llm: LLM) -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, max_tokens=4)  # type: ignore[arg-type]
    assert texts(llm.generate("a", sampling_params=params))
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[{"role": "user"}], [["user"]]], ids=str)
def test_a_message_without_a_text(llm: LLM, messages: list[dict[str, object]]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        llm.chat([messages] if isinstance(messages[0], list) else messages)


def test_a_conversation_with_calls_and_results(llm: LLM) -> None:
    """The bundled model's template knows no tools: calls and results are in words, null is an empty text."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    parts = [{"type": "text", "text": "12 C"}, {"type": "text", "text": "rain"}]
    result: dict[str, object] = {"role": "tool", "tool_call_id": "c1", "content": parts}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result,
    ]
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=1))
    prompt = llm.tokenizer.decode(answer.prompt_token_ids)
    assert '"name": "f", "arguments": {"a": 1}' in prompt and "12 C\nrain" in prompt and "None" not in prompt


def test_developer_is_system(llm: LLM) -> None:
    """The bundled model's template knows three roles."""

    def prompt(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=1))
        return answer.prompt_token_ids

    assert prompt("developer") == prompt("system") != prompt("user")
    with pytest.raises(RequestError, match="unknown role: king"):
        prompt("king")


def test_a_map_of_precisions() -> None:
    with LLM("tiny", precision={"default": "w4a8", "layers.0.*": "bf16"}, evaluate=False) as mixed:
        assert texts(mixed.generate("The", GREEDY))
    with pytest.raises(MillraceError, match=r"layer\.0\.\*"):
        LLM("tiny", precision={"default": "w4a8", "layer.0.*": "bf16"})


def test_p19_keys_and_values_in_int8() -> None:
    """Half the memory of bfloat16, less a scale for each token and head: so many more pages in the same memory."""
    memory = 32 * 2**20
    with (
        LLM("tiny", precision="w8a8", kv_cache_dtype="int8", kv_memory=memory, evaluate=False) as small,
        LLM("tiny", precision="w8a8", kv_memory=memory, evaluate=False) as plain,
    ):
        per_page = [m._opened.engine.page_bytes for m in (small, plain)]
        assert per_page[0] == per_page[1] * (32 + 4) // 64
        assert isinstance(small._opened, RunningModel) and isinstance(plain._opened, RunningModel)
        n_pages = [m.plan.n_pages for m in (small._opened, plain._opened)]
        assert n_pages == [memory // n_bytes for n_bytes in per_page]
        assert small.generate("The", GREEDY)[0].outputs[0].token_ids


def test_the_user_s_cache_is_not_touched(llm: LLM, cache: Path) -> None:
    assert any((cache / "millrace").rglob("manifest.json"))


def test_closing_gives_the_memory_back() -> None:
    def once() -> int:
        with LLM("tiny", precision="w4a8", evaluate=False) as model:
            model.generate("The", GREEDY)
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    once()
    first = [once() for _ in range(3)][-1]
    assert [once() for _ in range(5)][-1] - first < 10 * 2**20


def test_after_closing_it_says_so() -> None:
    model = LLM("tiny", precision="w4a8", evaluate=False)
    model.close()
    model.close()
    with pytest.raises(MillraceError, match="closed"):
        model.generate("The", GREEDY)


def test_without_max_tokens_a_text_gets_a_few_tokens_and_a_chat_the_context(llm: LLM) -> None:
    """As vLLM and OpenAI's completions: who forgets max_tokens does not wait for minutes."""
    endless = SamplingParams(temperature=0, ignore_eos=True)
    (text,) = llm.generate("Once upon a time", endless)
    assert len(text.outputs[0].token_ids) == 16 and text.outputs[0].finish_reason == "length"
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], [endless, GREEDY])] == [16, 24]
    (least,) = llm.generate("a", SamplingParams(min_tokens=20, temperature=0))
    assert len(least.outputs[0].token_ids) == 20
    long = [5] * (2048 - 7)  # beside a short one, whose answer it must not shorten
    assert [len(o.outputs[0].token_ids) for o in llm.generate([long, [5, 6]], endless)] == [7, 16]
    (chat,) = llm.chat([{"role": "user", "content": "Tell me a story."}], endless)
    assert len(chat.prompt_token_ids) + len(chat.outputs[0].token_ids) == 2048


def test_log_probabilities_are_vllms_dicts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=4, logprobs=3, ignore_eos=True)
    choice = llm.generate("Once upon a time", params)[0].outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == 12
    for token_id, shown in zip(choice.token_ids, choice.logprobs, strict=True):
        assert token_id in shown and 3 <= len(shown) <= 4, (
            "the alternatives, and the chosen one where it is not of them"
        )
        ranks = sorted((p.rank, -p.logprob) for p in shown.values())
        assert ranks == sorted(ranks, key=lambda r: r[1]) and [r for r, _ in ranks][:3] == [1, 2, 3]
        assert shown[token_id].decoded_token == llm.tokenizer.token_text(token_id)
    chosen = [shown[i].logprob for i, shown in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))


def test_log_probabilities_of_the_prompt_are_vllms() -> None:
    """Beside others, in one step and in many: what transformers computes, and the same bits."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    prompts = ["Once upon a time there was a little dog. " * 3, "The"]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=2, logprobs=1, n=2)
    with LLM("tiny", precision="fp32") as llm:
        together = llm.generate([*prompts, "x " * 40], params)
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
        plain = llm.generate(prompts, dataclasses.replace(params, prompt_logprobs=None))
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / "tiny", dtype=torch.float32)
    for output, same, bare in zip(together, alone, plain, strict=False):
        assert output.prompt_logprobs == same.prompt_logprobs is not None and bare.prompt_logprobs is None
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in bare.outputs]
        assert output.outputs[0].logprobs == bare.outputs[0].logprobs
        ids = output.prompt_token_ids
        first, *rest = output.prompt_logprobs or []
        assert first is None and len(rest) == len(ids) - 1
        with torch.no_grad():
            want = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()
        for i, shown in enumerate(rest):
            assert (
                shown is not None
                and next(iter(shown)) == ids[i + 1]
                and shown.keys() >= set(want[i].argsort()[::-1][:2].tolist())
            )
            assert all(abs(p.logprob - want[i, token]) < 1e-4 for token, p in shown.items())
            assert shown[ids[i + 1]].rank == 1 + (want[i] > want[i, ids[i + 1]]).sum()


def test_the_tokenizer_is_used_as_vllms(llm: LLM) -> None:
    """A prompt that is rendered by hand is what `chat` renders; all calls are compared in test_hf_tokenizer.py."""
    tokenizer, messages = llm.get_tokenizer(), [{"role": "user", "content": "Hello!"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert texts(llm.generate({"prompt_token_ids": ids}, GREEDY)) == texts(llm.chat(messages, GREEDY))
    assert tokenizer.decode(ids) == prompt and len(tokenizer) == tokenizer.vocab_size == 2048


def test_sampling_parameters_are_named_and_survive_copies() -> None:
    with pytest.raises(RequestError, match="without its name"):
        SamplingParams(0.5)  # type: ignore[call-arg, arg-type]
    params = SamplingParams(temperature=0.5, stop="x")
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params, n=1) == params


def test_progress_is_shown_when_asked(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr() == ("", "")
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    out, err = capfd.readouterr()
    assert out == "" and "2/2" in err and "48 tokens" in err


def test_a_forked_child_is_told(llm: LLM) -> None:
    """Its threads stayed with the parent: it would wait for ever."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("The", GREEDY)
            said = "no error"
        except MillraceError as error:
            said = str(error)
        os.write(writing, said.encode())
        llm.close()  # must not wait for the threads either, nor take the parent's memory
        os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert "forked" in said and "spawn" in said
    assert texts(llm.generate("The", GREEDY)), "the parent goes on"


def test_it_cannot_be_pickled_and_says_so(llm: LLM) -> None:
    for copy_of in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(MillraceError, match="cannot be pickled"):
            copy_of(llm)


def test_errors_leave_the_caller_s_own_text_alone(tmp_path: Path) -> None:
    with pytest.raises(MillraceError, match="my--model-name"):
        LLM(tmp_path / "my--model-name")


def test_a_chat_takes_text_parts_and_refuses_a_bare_text(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    assert texts(llm.chat(parts, GREEDY)) == texts(llm.chat([{"role": "user", "content": "Hello!"}], GREEDY))
    with pytest.raises(RequestError, match="messages is a text"):
        llm.chat("Hello!")  # type: ignore[arg-type]


def test_a_value_that_python_cannot_print_is_no_traceback() -> None:
    with pytest.raises(RequestError, match="ignore_eos is of type list"):
        SamplingParams(ignore_eos=[10**5000])  # type: ignore[arg-type]
