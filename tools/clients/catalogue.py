"""Which clients, of which version, and what is known not to work with each.

A gap that works after all is an error too: then its line goes. So is one that fails for another reason. Versions are
pinned: a night compares with yesterday.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gap:
    """`why` is for people; `says` is what the failure must say, or it is another failure than the one expected."""

    why: str
    says: str


@dataclass(frozen=True, slots=True)
class Client:
    """`gaps`: the checks that are expected to fail.

    tiny: its server has the bundled model in float32, with whose numbers the client compares; else SmolLM2
    npm: the package of an agent's command, whose server has a scripted model
    """

    packages: tuple[str, ...]
    gaps: Mapping[str, Gap] = field(default_factory=dict)
    tiny: bool = False
    npm: str = ""


CLIENTS: Mapping[str, Client] = {
    "openai": Client(("openai==3.54.0",)),
    "anthropic": Client(("anthropic==2.12.0",)),
    "ollama": Client(("ollama==0.6.3",)),
    "litellm": Client(("litellm==1.106.2", "mcp==2.3.0")),
    "langchain": Client(("langchain-openai==1.7.3",)),
    "llama-index": Client(("llama-index-llms-openai-like==0.8.1",)),
    "instructor": Client(("instructor==1.17.0",)),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]==2.68.0",)),
    "smolagents": Client(("smolagents[openai]==1.26.0",)),
    "openai-agents": Client(("openai-agents==0.24.0",)),
    "llm": Client(("llm==0.36",)),
    "dspy": Client(("dspy==3.4.1",)),
    # with the small build of torch: the plain name would fetch gigabytes of CUDA
    "aiperf": Client(("torch==2.13.0", "aiperf==0.13.0")),
    "guidellm": Client(("torch==2.13.0", "guidellm==0.8.1")),
    "lm-eval": Client(
        ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "lm-eval[api]==0.4.13"), tiny=True
    ),
    "codex": Client((), npm="@openai/codex@0.171.0"),
    "claude-code": Client((), npm="@anthropic-ai/claude-code@2.1.332"),
}
