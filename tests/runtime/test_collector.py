"""What `Collector` does for a token does not grow with the tokens before it: counted, so that no clock is needed."""

from typing import cast

import pytest

from millrace.api.offline_generate import Collector, CompletionOutput, Logprob, RequestOutput
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.runtime.request.sampling_params import Delta, FinishReason, TokenLogprobs


class Counting:
    """As much of a tokenizer as is asked for, and how often."""

    def __init__(self) -> None:
        self.asked = 0

    def token_text(self, token: int) -> str:
        self.asked += 1
        return f"<{token}>"


@pytest.mark.parametrize("per_delta", [1, 7])
def test_log_probabilities_are_appended(per_delta: int) -> None:
    """In place: a new list for each token would copy all that came before."""
    n, tokenizer = 210, Counting()
    output = RequestOutput("r", None, [1], [CompletionOutput(0, "", [])], finished=False, seed=0)
    collector, choice = Collector(output, cast(Tokenizer, tokenizer)), output.outputs[0]
    tokens = [TokenLogprobs(i, -i / 8, rank=2, top=((900, -0.5), (i, -i / 8))) for i in range(n)]
    kept, entries = [], []
    for at in range(0, n, per_delta):
        part = tuple(tokens[at : at + per_delta])
        finish = FinishReason.LENGTH if at + per_delta == n else None
        came = collector.add([Delta(0, "x" * len(part), tuple(t.token_id for t in part), part, finish)])
        assert came == per_delta and choice.logprobs is not None
        kept.append(choice.logprobs)
        entries += choice.logprobs[at:]
    assert all(found is kept[0] for found in kept) and choice.logprobs is kept[0]
    assert len(choice.logprobs) == n and all(a is b for a, b in zip(choice.logprobs, entries, strict=True))
    assert tokenizer.asked == 2 * n, "each token and its alternative once"
    assert choice.logprobs[3] == {3: Logprob(-0.375, 2, "<3>"), 900: Logprob(-0.5, 1, "<900>")}
    assert choice.cumulative_logprob == pytest.approx(-(n * (n - 1) / 2) / 8) and output.finished
