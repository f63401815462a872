"""KV pages in a file: the same answers to the last bit with a hit, a miss, after eviction and after a restart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace import LLM, SamplingParams
from millrace.api.offline_generate import CompletionOutput
from millrace.errors import ConfigError
from millrace.runtime.loop_stats import LoopStats
from millrace.runtime.open_engine import RunningModel

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
PROMPTS = [
    f"{word} and the miller went to the mill and the river ran past it. " * 12 for word in ("Fox", "Owl", "Cat", "Hen")
]


Answers = list[CompletionOutput]  # equal where tokens, texts and log probabilities are


def asked(llm: LLM, prompts: list[str]) -> tuple[Answers, list[int]]:
    """Of each, one after the other: its answer, and how many tokens of its prompt were known."""
    answers = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    return [answer.outputs[0] for answer in answers], [answer.num_cached_tokens or 0 for answer in answers]


@pytest.mark.parametrize(
    "kv", ["bf16", *(pytest.param(kv, marks=pytest.mark.nightly) for kv in ("int8", "fp8", "int4"))]
)
def test_bits_do_not_depend_on_where_pages_were(kv: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"kv_cache_dtype": kv, "max_context": 512, "max_batch": 1, "tune": 0}
    with LLM("tiny", **common, prefix_cache=False) as llm:
        plain, _ = asked(llm, PROMPTS)
        small = llm._opened.engine.page_bytes * 8
    common |= {"kv_memory": small, "kv_tier": str(tmp_path / "tier"), "kv_tier_size": 64 * 2**20}
    with LLM("tiny", **common) as llm:
        first, _ = asked(llm, PROMPTS)
        again, n_again = asked(llm, PROMPTS)
        assert (
            isinstance(llm._opened, RunningModel) and llm._opened.tier is not None and llm._opened.tier.n_found > 0
        ), "eight pages hold one of them"
    with LLM("tiny", **common) as llm:
        restarted, n_restarted = asked(llm, PROMPTS)
    assert all(answer.logprobs and len(answer.logprobs) == GREEDY.max_tokens for answer in plain)
    assert first == plain and again == plain and restarted == plain
    assert all(n > 128 for n in n_again) and all(n > 128 for n in n_restarted[:3])


def test_what_memory_knew_is_known_after_a_restart(tmp_path: Path) -> None:
    """Nothing was ever given up, and nothing written before the end."""
    common: dict[str, Any] = {"max_context": 512, "max_batch": 8, "tune": 0, "kv_tier": str(tmp_path / "tier")}
    with LLM("tiny", **common) as llm:
        first, _ = asked(llm, PROMPTS)
        assert isinstance(llm._opened, RunningModel) and llm._opened.tier is not None and not len(llm._opened.tier)
    with LLM("tiny", **common) as llm:
        again, known = asked(llm, PROMPTS)
    assert again == first and all(n > 128 for n in known)


@pytest.mark.parametrize("kv", ["bf16", *(pytest.param(kv, marks=pytest.mark.nightly) for kv in ("fp32", "int8"))])
def test_preempted_answers_come_back_from_the_tier(kv: str, tmp_path: Path) -> None:
    """Four that grow to 300 tokens each in twelve pages: answers as alone, with pages that were in the file."""
    params = replace(GREEDY, max_tokens=200)
    prompts = [prompt[:250] for prompt in PROMPTS]
    common: dict[str, Any] = {"kv_cache_dtype": kv, "max_context": 512, "max_batch": 4, "tune": 0}
    with LLM("tiny", **common, prefix_cache=False) as llm:
        plain = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
        small = llm._opened.engine.page_bytes * 12
    with LLM("tiny", **common, kv_memory=small, kv_tier=str(tmp_path / "tier"), kv_tier_size=64 * 2**20) as llm:
        assert [answer.outputs[0] for answer in llm.generate(prompts, params)] == plain
        stats = llm._loop.stats()
        assert isinstance(stats, LoopStats)
        assert stats.preemptions_total > 0 and stats.tier is not None and stats.tier.found_total > 0


def test_its_size_needs_its_file() -> None:
    with pytest.raises(ConfigError, match="size is given, and"):
        LLM("tiny", max_context=256, tune=0, kv_tier_size=2**20)


def test_it_needs_the_prefix_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        LLM("tiny", max_context=256, tune=0, prefix_cache=False, kv_tier=str(tmp_path / "tier"))
