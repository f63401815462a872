"""Greedy generation for the tasks of `evaluate`."""

from collections.abc import Generator, Sequence
from contextlib import closing

from millrace.api.offline_generate import incoming
from millrace.errors import MachineError
from millrace.evaluate.generation import GenerationTask
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams


def generate_greedily(loop: EngineLoop, tasks: Sequence[GenerationTask]) -> Generator[tuple[int, str], None, None]:
    """Yield (index of a task, its text) as answers finish. raises MachineError if an answer fails"""
    params = [
        SamplingParams(
            temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, max_tokens=task.max_tokens, stop=task.stop
        )
        for task in tasks
    ]
    prompts = [{"prompt_token_ids": task.ids} for task in tasks]
    with closing(incoming(loop, prompts, params)) as outputs:
        for i, output, _ in outputs:
            if output.finished:
                (choice,) = output.outputs
                if choice.finish_reason == FinishReason.ERROR:
                    problem = f"an answer failed: {choice.error}"
                    raise MachineError(problem, "a finite answer", "try another --precision")
                yield i, choice.text
