"""Limits of llguidance per grammar, the same for all callers: counted work and states, not time.

Therefore a refusal does not depend on the machine's speed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

LEXER_FUEL = 1_000_000  # to build a lexer: about 20 ms
STEP_FUEL, STEP_ITEMS = 200_000, 50_000  # to compute a mask: about 15 ms
LEXER_STATES = 20_000  # 1 to 2 KB each
GRAMMAR_SIZE = 250_000  # symbols


def limits() -> dict[str, int | bool]:
    """Return the limits under llguidance's names."""
    return {
        "initial_lexer_fuel": LEXER_FUEL, "step_lexer_fuel": STEP_FUEL, "step_max_items": STEP_ITEMS,
        "max_lexer_states": LEXER_STATES, "max_grammar_size": GRAMMAR_SIZE, "verbose_errors": False,
    }  # fmt: skip


def parser_limits() -> "LLParserLimits":
    """Return the limits as llguidance's own type."""
    from llguidance import LLParserLimits

    return LLParserLimits(**limits())
