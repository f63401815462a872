"""Runs one request on an engine loop in this thread, with streaming and timings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.api.offline_generate import Collector, RequestOutput, new_output
from millrace.checkpoint.chat.chat_prompt import PromptRenderer
from millrace.checkpoint.chat.chat_template import normalised
from millrace.errors import CheckpointError, MachineError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import RunningModel
from millrace.runtime.request.request import Timings
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class TimedGeneration:
    """A finished request with its times."""

    output: RequestOutput
    timings: Timings

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.output.outputs]

    @property
    def prefill(self) -> tuple[int, float]:
        """Return (tokens, seconds) until the first token, without prompt tokens from the prefix cache."""
        t = self.timings
        n_computed = len(self.output.prompt_token_ids) - (self.output.num_cached_tokens or 0)
        return n_computed, (t.first_token_s or 0.0) - (t.first_scheduled_s or 0.0)

    @property
    def decode(self) -> tuple[int, float]:
        """Return (tokens, seconds) after the first token of each choice."""
        t = self.timings
        return max(t.n_output_tokens - len(self.output.outputs), 0), (t.last_token_s or 0.0) - (t.first_token_s or 0.0)

    def summary(self) -> str:
        prefill, decode = (
            f"{name} {n} tokens in {seconds:.3f} s" + (f" ({n / seconds:,.0f} tokens/s)" if seconds > 0 and n else "")
            for name, (n, seconds) in (("prefill", self.prefill), ("decode", self.decode))
        )
        return f"{prefill}; {decode}; {self._ended()}; seed {self.output.seed}"

    def _ended(self) -> str:
        return "ended by " + ", ".join(sorted({str(c.finish_reason) for c in self.output.outputs}))

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON data."""

        def rate(n: int, seconds: float) -> dict[str, float | None]:
            return {"tokens": n, "seconds": seconds, "tokens_per_s": n / seconds if seconds > 0 else None}

        choices = [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason, "error": c.error}
            for c in self.output.outputs
        ]
        return {"choices": choices, "seed": self.output.seed} | {
            "prefill": rate(*self.prefill),
            "decode": rate(*self.decode),
        }

    def raise_error(self) -> None:
        """Raise MachineError if a choice failed; a stopped choice is no failure."""
        for choice in self.output.outputs:
            if choice.finish_reason == FinishReason.ERROR:
                raise MachineError(f"the request failed: {choice.error}", "a finite answer", "try another --precision")


def stream(
    loop: EngineLoop,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    show: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> TimedGeneration:
    """Step `loop` until the request is done, or `stopped` returns True. show: gets the text of the first choice

    raises RequestError if the prompt or the parameters are invalid
    """
    arrived: list[Delta] = []
    request = loop.submit(prompt_ids, params, arrived.extend)
    collector = Collector(new_output(request), loop.tokenizer)
    while not collector.output.finished:
        if stopped():
            loop.cancel(request)
        loop.step()
        if show is not None:
            text = "".join(d.text for d in arrived if d.index == 0)
            if text:
                show(text)
        collector.add(arrived)
        arrived.clear()
    collector.output.num_cached_tokens = request.n_cached
    return TimedGeneration(collector.output, request.timings)


def chat_ids(model: RunningModel, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """Tokenise a conversation with the model's chat template. raises CheckpointError if it has none"""
    if model.chat_template is None:
        raise CheckpointError(
            f"{model.name} has no chat template", "a chat model", "use `millrace generate`, or a model tuned for chat"
        )
    return model.tokenizer.encode(
        PromptRenderer(model.chat_template).render(normalised(messages)), add_special_tokens=False
    )
