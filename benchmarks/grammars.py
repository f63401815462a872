"""What it costs to hold 16 answers to 16 different schemas: time of a step with masks, and without.

    python -m benchmarks.grammars --model SmolLM2-135M-Instruct.Q4_1.gguf --beside ENGINE

Both ways take turns, round by round, with the same prompts and numbers of tokens. A step is from the beginning of one
to that of the next, so that masks, which are made between steps, count. Their cost depends on vocabulary and grammars,
not on the model: beside the model's own step it is set against that of another engine (`--beside`, 16 rows behind 128
tokens), such as one of 1.1B parameters with random weights, which no grammar could be tried on.
Writes results/grammars-TIME-COMMIT.json. Needs an otherwise idle machine.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.measure import decode, pages_for
from benchmarks.record import RESULTS, count, judged, provenance, write_result
from millrace import LLM, SamplingParams, StructuredOutputsParams
from millrace.engine.artifact.engine import Engine
from millrace.machine.cpu import usable_cores
from millrace.runtime.loop import EngineLoop

ROWS, TOKENS, ROUNDS = 16, 96, 5
GOAL = 0.05  # of a step of 1.1B


def schema(i: int) -> dict[str, Any]:
    """Each another one, and long enough for all tokens: objects in a list, with texts, numbers and a choice."""
    item = {
        "type": "object",
        "properties": {
            f"name_{i}": {"type": "string", "maxLength": 12 + i},
            "count": {"type": "integer", "minimum": 0, "maximum": 90 + i},
            "kind": {"enum": [f"kind-{i}-{j}" for j in range(8)]}, "done": {"type": "boolean"},
        },
        "required": [f"name_{i}", "count", "kind", "done"], "additionalProperties": False,
    }  # fmt: skip
    return {"type": "array", "items": item, "minItems": 12, "maxItems": 12}


def step_s(llm: LLM, params: Sequence[SamplingParams]) -> float:
    """Median of the steps in which all rows are drawn."""
    prompts = [f"Write a list of things of sort {i}." for i in range(ROWS)]
    assert isinstance(llm._loop, EngineLoop)
    seen = llm._loop.history.steps
    seen.clear()
    llm.generate(prompts, list(params))
    full = [step for step in seen if step.parts["draws"].sum() == len(step.parts) == ROWS]
    between = [b.began_s - a.began_s for a, b in itertools.pairwise(full) if b.number == a.number + 1]
    return statistics.median(between)


def measured(model: str, beside: Path | None, threads: int, messages: Console) -> dict[str, Any]:
    free = [SamplingParams(max_tokens=TOKENS, seed=i, temperature=1.0, ignore_eos=True) for i in range(ROWS)]
    held = [
        SamplingParams(
            max_tokens=TOKENS, seed=i, temperature=1.0, structured_outputs=StructuredOutputsParams(json=schema(i))
        )
        for i in range(ROWS)
    ]  # fmt: skip
    samples: dict[str, list[float]] = {"free_s": [], "held_s": []}
    with LLM(model, threads=threads, max_context=1024, max_batch=ROWS, prefix_cache=False) as llm:
        for way in (free, held):  # warm: grammars are compiled, pages touched
            step_s(llm, way)
        for number in range(ROUNDS):
            messages.print(f"round {number + 1} of {ROUNDS}")
            samples["free_s"].append(step_s(llm, free))
            samples["held_s"].append(step_s(llm, held))
    more_s = [b - a for a, b in zip(*samples.values(), strict=True)]
    cost_s, own_s = statistics.median(more_s), statistics.median(samples["free_s"])
    result = {"samples": samples, "cost_s": cost_s, "step_s": own_s, "share_of_own_step": cost_s / own_s}
    if beside is not None:
        pages = pages_for(ROWS, 256)
        with closing(Engine.open(beside)) as engine, closing(engine.executor(n_pages=pages, threads=threads)) as other:
            timing, _ = decode(other, ROWS, 128, 16, threads, ROUNDS)
        other_s = timing.median_s / 16
        result |= {"beside": beside.parent.name, "beside_step_s": other_s, "share": cost_s / other_s}
        result["goal"] = judged("a mask's share of a step", cost_s / other_s, GOAL, GOAL, at_most=True)
    return result


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grammars", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model with a tokenizer of its own: a GGUF file or a folder")
    parser.add_argument("--beside", type=Path, help="an engine, whose step the cost is set against")
    parser.add_argument("--threads", type=count, default=usable_cores())
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result file goes")
    args = parser.parse_args()
    messages = Console(stderr=True)
    found = measured(args.model, args.beside, args.threads, messages)
    result = {**provenance("benchmarks.grammars"), "rows": ROWS, "tokens": TOKENS, "threads": args.threads, **found}
    path = write_result("grammars", result, args.results)
    shares = ", ".join(f"{name} {result[name]:.2%}" for name in ("share_of_own_step", "share") if name in result)
    messages.print(f"{ROWS} masks: {result['cost_s'] * 1e3:.2f} ms a step; {shares}\nwritten: {path}")


if __name__ == "__main__":
    main()
