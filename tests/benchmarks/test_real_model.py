"""A real model of a real file: what each precision may cost of its answers, and that llama.cpp's cost no less.

Nothing here is of a size that a loaded machine changes: all figures are computed, none is a time.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.copies import copied, in_q8_0
from benchmarks.perplexity import HEADS, LLAMA_CPP, Cost, Text, Variant, costs, given_text, ours
from benchmarks.recipes import llama_cpps
from millrace import LLM, SamplingParams
from millrace.engine.executor import IntArray
from millrace.evaluate.divergence import Reader
from tests.support.shared import shared
from tools.nightly.packages import smollm2

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("default"),  # of llama-cpp-python, while it loads
    pytest.mark.timeout(1800),
]
PROSE = Path(__file__).parents[2] / "LICENSE"  # of English prose, what changes least
KL = 0.004  # nats a token: of weights as stored, and of W8A8 as it is by default
HEAD_KL = 0.001  # of the head alone
FACTOR = 1.5  # llama.cpp rounds the same activations in the same groups, in another order


def wikitext() -> Path:
    return shared("data/wikitext2/wiki.test.txt")


def few(path: Path, text: Path, windows: int) -> Text:
    whole = given_text(path, text)
    return Text(whole.sequences[:windows], whole.first)


def test_what_is_stored_costs_as_little_as_with_llama_cpp() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = smollm2()
    reference, found, theirs = costs(
        path,
        few(path, PROSE, 8),
        (Variant("fp32", "fp32"), Variant("as stored", None)),
        {LLAMA_CPP: partial(llama_cpps, path)},
    )
    assert reference.mean_kl == 0 and found.mean_kl < KL and found.mean_kl < FACTOR * theirs.mean_kl, (found, theirs)
    assert abs(found.ratio - 1) < 0.01 and found.agreement > 0.9, found


def test_the_price_of_a_precision_is_bounded() -> None:
    """Of the file as it is, and rounded anew to eight bits; then of its head alone."""
    path = smollm2()
    text = few(path, wikitext(), 12)
    _, stored, eight = costs(path, text, (Variant("fp32", "fp32"), Variant("as stored", None), Variant("w8a8", "w8a8")))
    assert stored.mean_kl <= KL and abs(stored.ratio - 1) < 0.005, stored
    assert eight.mean_kl <= KL and "by Hadamard" in eight.weights, eight
    _, *heads = costs(path, text, HEADS[:4])
    assert all(h.mean_kl <= HEAD_KL for h in heads), heads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_in_floats_cost_no_more_in_eight_bits(dtype: str, tmp_path: Path) -> None:
    path = copied(smollm2(), tmp_path / "copy", dtype)
    _, found = costs(path, few(path, wikitext(), 12), (Variant("fp32", "fp32"), Variant("w8a8", "w8a8")))
    assert found.mean_kl <= KL and found.weights == "int8, groups of 128, by Hadamard", found


def test_a_copy_in_q8_0_costs_no_more(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = in_q8_0(smollm2(), tmp_path)
    _, found = costs(path, few(path, wikitext(), 12), (Variant("fp32", "fp32"), Variant("w8a8", None)))
    assert found.mean_kl <= KL and found.weights == "int8, groups of 32", found


QUESTIONS = (
    "What is the capital of France?", "Hello", "Write a sentence about rivers.", "What is 2 + 2?", "Who wrote Hamlet?",
    "Why is the sky blue?", "What does a miller do?", "Explain what a cache is.",
)  # fmt: skip
NEW = 24
NEAR = 0.5  # nats between two tokens that roundings of KL 0.004 may turn around


def test_chats_are_the_same_where_nothing_is_rounded(tmp_path: Path) -> None:
    """What the codes of the file stand for, in float32 with float32 keys and values on both sides: every token."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    import llama_cpp

    from benchmarks.peers.gguf_file import quantise

    path, plain = smollm2(), tmp_path / "f32.gguf"
    quantise(path, plain, "F32")
    length = 128
    with (
        ours(path, Variant("fp32", "fp32"), length) as (_, mine, _),
        llama_cpps(plain, length, llama_cpp.GGML_TYPE_F32) as (_, theirs, _),
    ):
        for question, prompt in zip(QUESTIONS, prompts(path), strict=True):
            assert greedy(mine, prompt) == greedy(theirs, prompt), question


def test_chats_part_only_where_two_tokens_are_as_good(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy ones, ours and llama.cpp's, which computes what the file stores as well. Where they first differ, float32
    says what ours says, or has both tokens nearly as likely."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = smollm2()
    length = 128
    with (
        ours(path, Variant("fp32", "fp32"), length) as (_, exact, _),
        ours(path, Variant("as stored", None), length) as (_, stored, _),
        llama_cpps(path, length) as (_, theirs, _),
    ):
        parts: dict[str, dict[str, Any]] = {}
        for question, prompt in zip(QUESTIONS, prompts(path), strict=True):
            mine, other = greedy(stored, prompt), greedy(theirs, prompt)
            at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
            if at is not None:
                row = exact(np.array([*mine[:at], 0], np.int32), at - 1)[0]
                above = float(row[mine[at]] - row[other[at]])
                parts[question] = {
                    "at_token": at - len(prompt), "float32_says_ours": bool(row.argmax() == mine[at]),
                    "ours_above_theirs_nats": round(above, 4),
                }  # fmt: skip
    with capsys.disabled():  # a night keeps it
        told = {"chats": len(QUESTIONS), "tokens_each": NEW, "same": len(QUESTIONS) - len(parts), "parts": parts}
        sys.stdout.write("\n" + json.dumps({"chats_beside_llama_cpp": told}) + "\n")
    for question, found in parts.items():
        assert found["float32_says_ours"] or abs(found["ours_above_theirs_nats"]) < NEAR, (question, found)


def prompts(path: Path) -> list[list[int]]:
    """Each question in the model's own template."""
    with LLM(path, max_context=512, tune=0) as llm:
        asked = [[{"role": "user", "content": q}] for q in QUESTIONS]
        return [[*a.prompt_token_ids] for a in llm.chat(asked, SamplingParams(temperature=0, max_tokens=1))]


def greedy(read: Reader, prompt: list[int]) -> list[int]:
    ids: IntArray = np.array(prompt, np.int32)
    for _ in range(NEW):
        following = read(np.append(ids, np.int32(0)), len(ids) - 1)[0].argmax()
        ids = np.append(ids, np.int32(following))
    return [int(i) for i in ids]


def test_chats_cost_as_little_as_with_llama_cpp() -> None:
    """A small model's chats are where roundings are seen first: near-ties decide its first words."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = smollm2()
    with ours(path, Variant("fp32", "fp32"), 128) as (_, exact, _):
        text = Text([np.array(greedy(exact, prompt), np.int32) for prompt in prompts(path)])
    variants = (Variant("fp32", "fp32"), Variant("as stored", None), Variant("bf16", "bf16"))
    found: list[Cost] = costs(path, text, variants, {LLAMA_CPP: partial(llama_cpps, path)})
    _, stored, half, theirs = found
    assert stored.mean_kl < 2 * KL and stored.mean_kl < FACTOR * theirs.mean_kl and half.mean_kl < KL / 4, found
