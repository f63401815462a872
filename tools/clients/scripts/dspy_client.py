"""DSPy: a prediction and a chain of thought over its own formats."""

import dspy
from report import BASE, MODEL, check

lm = dspy.LM(f"openai/{MODEL}", api_base=BASE, api_key="none", max_tokens=200, temperature=0.0, cache=False)
dspy.configure(lm=lm)


@check("lm")
def _() -> None:
    assert lm("What is the capital of France?")[0]


@check("messages and n")
def _() -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    assert len(lm(messages=hello, n=2, temperature=0.9, max_tokens=8)) == 2


@check("streams")
def _() -> None:
    with dspy.context(adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        lm.forward(messages=[{"role": "user", "content": "Hello!"}], max_tokens=8)
