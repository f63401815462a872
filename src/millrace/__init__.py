"""Millrace: from a checkpoint to a chat endpoint, as fast as the machine at hand allows."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.api.llm import LLM
    from millrace.api.offline_generate import RequestOutput
    from millrace.errors import MillraceError
    from millrace.runtime.request.sampling_params import SamplingParams
    from millrace.runtime.request.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "MillraceError", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

_HOMES = {
    "LLM": "millrace.api.llm",
    "MillraceError": "millrace.errors",
    "RequestOutput": "millrace.api.offline_generate",
    "SamplingParams": "millrace.runtime.request.sampling_params",
    "StructuredOutputsParams": "millrace.runtime.request.structured_outputs",
}


def __getattr__(name: str) -> object:
    """Imported at first use, so that `import millrace` costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
