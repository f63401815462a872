"""The packed arrays of a step, laid out by hand."""

import numpy as np

from millrace.engine.executor import SAMPLING, ExecutorLimits, StepInputs, StepOutputs
from millrace.runtime.kv.int_buffer import IntBuffer
from millrace.runtime.request.request import Sequence
from millrace.runtime.request.sampling_params import SamplingParams, TokenLogprobs
from millrace.runtime.scheduling.step import BatchBuilder, Chunk, Step
from millrace.runtime.structured_output.grammar import GrammarCompiler
from tests.runtime.fakes import EOS, LIMITS, VOCAB, FakeTokenizer, limits, new_request

GRAMMARS = GrammarCompiler(FakeTokenizer(), VOCAB, [EOS])


def sequence(prompt: list[int], params: SamplingParams, pages: list[int]) -> Sequence:
    seq = new_request(prompt, params, LIMITS).choices[-1]
    seq.pages.extend(tuple(pages))
    return seq


def build(chunks: list[Chunk], of: ExecutorLimits = LIMITS) -> StepInputs:
    return BatchBuilder(of, GRAMMARS).build(Step(chunks, sum(c.n for c in chunks), 0))


def test_prefill_and_decode_rows_are_packed() -> None:
    plain = sequence([5, 6, 7, 8, 9], SamplingParams(seed=3), [20, 21, 22])
    biased = sequence([1, 2], SamplingParams(seed=-1, logit_bias={4: 1.0, 2: -1.0}), [30])
    fined = sequence([3], SamplingParams(n=2, seed=9, frequency_penalty=0.5, top_k=7, logprobs=2), [40])
    fined.tokens.append(11)
    got = build([Chunk(fined, 1, 1, True), Chunk(plain, 1, 3, False), Chunk(biased, 0, 2, True)])
    assert got.tokens.tolist() == [11, 6, 7, 8, 1, 2] and got.positions.tolist() == [1, 1, 2, 3, 0, 1]
    assert got.starts.tolist() == [0, 1, 4, 6]
    assert got.pages.tolist() == [40, 20, 30], "only the pages up to the last position"
    assert got.page_starts.tolist() == [0, 1, 2, 3]
    assert got.sampling.dtype == SAMPLING
    assert got.sampling["token"].tolist() == [0, 5] and got.sampling["position"].tolist() == [2, 2]
    assert got.sampling["seed"].tolist() == [9, 2**64 - 1] and got.sampling["choice"].tolist() == [1, 0]
    assert got.sampling["n_top"].tolist() == [2, -1] and got.sampling["top_k"].tolist() == [7, 0]
    assert got.history.tolist() == [3, 11]
    assert got.sampling[["history_start", "history_prompt", "history_output"]].tolist() == [(0, 1, 1), (0, 0, 0)]
    assert got.bias_ids.tolist() == [2, 4] and got.bias_values.tolist() == [-1.0, 1.0]
    assert got.sampling[["bias_start", "bias_count"]].tolist() == [(0, 0), (0, 2)]
    for array in (got.tokens, got.positions, got.starts, got.pages, got.page_starts, got.history, got.bias_ids):
        assert array.dtype == np.int32 and array.flags.c_contiguous


def test_a_step_without_draws_has_no_rows() -> None:
    got = build([Chunk(sequence([5, 6, 7], SamplingParams(), [1]), 0, 2, False)])
    assert len(got.sampling) == 0 and len(got.history) == 0 and len(got.bias_ids) == 0


def test_the_largest_step_fits_the_buffers() -> None:
    of = limits(max_sequences=3, max_step_tokens=300, max_context=128, page_tokens=5)
    seqs = [sequence([1] * 100, SamplingParams(), list(range(20 * i, 20 * i + 20))) for i in range(3)]
    got = build([Chunk(seq, 0, 100, True) for seq in seqs], of)
    assert len(got.tokens) == 300 and got.pages.tolist() == list(range(60))


def test_a_row_is_clean_whatever_was_in_it_before() -> None:
    builder = BatchBuilder(LIMITS, GRAMMARS)
    fined = sequence([3], SamplingParams(seed=9, frequency_penalty=0.5, logit_bias={4: 1.0}), [40])
    plain = sequence([5], SamplingParams(seed=9), [41])
    builder.build(Step([Chunk(fined, 0, 1, True)], 1, 0))
    row = builder.build(Step([Chunk(plain, 0, 1, True)], 1, 0)).sampling[0]
    assert (row["history_prompt"], row["bias_count"], row["frequency_penalty"]) == (0, 0, 0)


def test_log_probabilities_of_a_row() -> None:
    outputs = StepOutputs(
        tokens=np.array([4, 5], dtype=np.int32),
        logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        ranks=np.array([1, 2], dtype=np.int32),
        top_ids=np.array([[4, 6], [7, 5]], dtype=np.int32),
        top_logprobs=np.array([[-0.5, -1.0], [-0.125, -0.25]], dtype=np.float32),
    )
    assert TokenLogprobs.from_row(outputs, 1, 2) == TokenLogprobs(5, -0.25, 2, ((7, -0.125), (5, -0.25)))
    assert TokenLogprobs.from_row(outputs, 0, 0) == TokenLogprobs(4, -0.5, 1, ())


def test_a_buffer_grows_and_keeps_its_values() -> None:
    buffer = IntBuffer((1, 2))
    for i in range(100):
        buffer.append(i)
    buffer.extend(tuple(range(500)))
    assert buffer.array.tolist() == [1, 2, *range(100), *range(500)] and len(buffer) == 602
    buffer.clear()
    assert len(buffer) == 0 and buffer.array.tolist() == []
