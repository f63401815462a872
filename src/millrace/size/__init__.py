"""Sizing: from a business question to the systems to buy.

from millrace.size import plan
plan(model="llama-3-8b", isl=2000, osl=200, rate=70, ttft_ms=500, hardware=["H100"]).plan.systems
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.size.answer.answer import plan as plan


def __getattr__(name: str) -> Any:
    """Import `plan` on first use: `--help` needs only the settings."""
    if name == "plan":
        from millrace.size.answer.answer import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
