"""A server whose model is scripted: it calls the agent's shell once, and ends when it is given the result.

Agents describe themselves in prompts that no small model follows. All but the model is what `millrace serve` runs.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from millrace.engine.executor import ExecutorLimits
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import limits
from tests.serve.support import Fake, running
from tests.serve.thinkers import TEMPLATE, Saying, vocabulary

SHOWN, DONE = "millrace-42", "All is done."
COMMAND = "echo millrace-$((40 + 2))"
# Tools by which agents run a command, and what each is called with.
SHELLS = {"exec_command": {"cmd": COMMAND}, "Bash": {"command": COMMAND, "description": "Say a number"}}
CONTEXT = (
    9 << 14
)  # as an agent meets it: its prompt fits (a token for each of its 40 to 100 kB), its max_tokens does not


class Agent(Saying):
    """Its answers follow from the prompt."""

    @property
    def says(self) -> str:  # type: ignore[override]
        if "<|im_start|>tool\n" in self.prompt:
            return DONE if SHOWN in self.prompt else "The tool said something else."
        shell = next((name for name in SHELLS if f'"name": "{name}"' in self.prompt), None)
        if shell is None:  # a request beside the loop, such as one for a title
            return DONE
        call = json.dumps({"name": shell, "arguments": SHELLS[shell]})
        return f"<tool_call>\n{call}\n</tool_call>"


@contextmanager
def scripted(model: str) -> Iterator[str]:
    """Yield its URL. It answers by the name `model`, and by every other."""
    words = vocabulary(special=False)
    of = limits(vocab_size=words.vocab_size, max_context=CONTEXT, max_step_tokens=4096, n_pages=CONTEXT // 4)

    def executor(limits: ExecutorLimits, before_run: Any) -> Agent:
        return Agent(limits, before_run, words)

    template = TEMPLATE.replace("OPENED", '""')
    fake = Fake(limits=of, template=template, ends=True, words=words, executor=executor, aliases=(model, "*"))
    with running(fake, ServerSettings(port=0)) as served:
        yield served.url
