"""Traces of what a loop did lately, against a plain search of its steps."""

import pytest

from millrace.runtime import step_history
from millrace.runtime.request.sampling_params import SamplingParams
from tests.runtime.fakes import make_loop


@pytest.mark.parametrize("most", [512, 3])
def test_a_trace_has_the_steps_of_its_request_alone(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several with the same id, as one call with several prompts has them, beside others, some still running."""
    monkeypatch.setattr(step_history, "MAX_STEPS", most)
    loop = make_loop()
    for i, (name, n) in enumerate([("a", 4), ("b", 9), ("a", 12), ("c", 3), ("a", 40)]):
        params = SamplingParams(max_tokens=n, n=1 + i % 2, seed=i, ignore_eos=True)
        loop.submit([1 + i, 2, 3], params, lambda deltas: None, request_id=name)
        loop.step()
    for _ in range(15):
        loop.step()
    for name, orders in (("a", [1, 3, 5]), ("b", [2]), ("c", [4]), ("d", [])):
        found = loop.traces(name)
        assert [trace.record.order for trace in found] == orders
        for trace, order in zip(found, orders, strict=True):
            own = [[part for part in step.parts.tolist() if part[0] == order] for step in loop.history.steps]
            expected = [(i + 1, parts) for i, parts in enumerate(own) if parts][-most:]
            assert [(step.number, parts.tolist()) for step, parts in trace.steps] == expected
            assert len(expected) == most or most > 40
    loop.stop()
