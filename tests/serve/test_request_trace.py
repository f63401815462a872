"""What a trace makes of the steps that a loop remembers."""

import numpy as np
import pytest

from millrace.runtime.request.request import Timings
from millrace.runtime.step_history import PART, RequestRecord, RequestTrace, StepRecord
from millrace.serve.ops.request_trace import _prompt_token_s, _trace
from millrace.serve.ops.step_timeline import PAUSE_S, _without_pauses

# 1,000 tokens of a prompt alone; then the last token of one that was known, beside 15 answers; then answers alone.
ANSWERS = [(i, 0, 50, 1, 0, True) for i in range(15)]
KNOWN = (21, 0, 1000, 1, 1, True)


def seen_step(
    number: int, began_s: float, took_s: float, parts: list[tuple[int, int, int, int, int, bool]]
) -> StepRecord:
    return StepRecord(number, began_s, took_s, 0, np.array(parts, PART), tuple(f"request-{p[0]}" for p in parts))


LONG = seen_step(1, 10.0, 0.2, [(20, 0, 0, 1000, 1000, True)])
SHORT = seen_step(2, 10.2, 0.016, [KNOWN, *ANSWERS])
PLAIN = seen_step(3, 10.3, 5.0, ANSWERS)


def test_a_hit_saved_what_a_miss_takes() -> None:
    """By the pace of all prompts, not by that of the token that a hit leaves over: its step is not its own."""
    pace = _prompt_token_s([LONG, SHORT, PLAIN])
    assert pace == pytest.approx((0.2 + 0.016 / 16) / 1001)
    seen = RequestRecord(21, "known", 1001, 1000, Timings(10.1, 10.2, 10.216, n_output_tokens=1), "")
    told = _trace(RequestTrace(seen, [(SHORT, SHORT.parts[:1])]), pace)
    assert told.prefill_saved_ms == pytest.approx(1000 * 201 / 1001, abs=1e-3)
    (step,) = told.steps
    assert (step.prompt_tokens, step.drawn_tokens, step.all_tokens, step.n_others) == (1, 1, 16, 15)


def test_without_a_prompt_nothing_is_known() -> None:
    assert _prompt_token_s([PLAIN]) is None and _prompt_token_s([]) is None
    seen = RequestRecord(0, "other-0", 50, 0, Timings(0.0), "")
    assert _trace(RequestTrace(seen, []), None).prefill_saved_ms is None


def test_a_pause_of_an_hour_is_short_on_the_page() -> None:
    steps = [seen_step(1, 0.0, 0.5, []), seen_step(2, 0.502, 1.0, []), seen_step(3, 3600.0, 2.0, [])]
    begins, end_s = _without_pauses(steps)
    assert begins == pytest.approx([0.0, 0.502, 1.502 + PAUSE_S]) and end_s == begins[-1] + 2.0
