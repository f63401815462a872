"""Which clients, of which version, and what is known not to work with each.

A gap that works after all is an error too: then its line goes. Versions are pinned: a night compares with yesterday.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

TOOLS = "tools are refused with the reason; structured output and tools come with grammars"
SCHEMA = "response_format is refused with the reason; it comes with grammars"
ECHO = "log probabilities of prompts are refused with the reason; they come with kept values"
RESPONSES = "/v1/responses is not there yet; /v1/chat/completions is"


@dataclass(frozen=True, slots=True)
class Client:
    """`gaps`: check -> why it is expected to fail."""

    packages: tuple[str, ...]
    gaps: Mapping[str, str] = field(default_factory=dict)


CLIENTS: Mapping[str, Client] = {}
