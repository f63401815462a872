"""What llguidance may spend on a grammar, whoever asks: work and states that it counts, no time.

So a refusal does not depend on the machine.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

LEXER_FUEL = 1_000_000  # to build a lexer: some 20 ms
STEP_FUEL, STEP_ITEMS = 200_000, 50_000  # for a mask: some 15 ms
LEXER_STATES = 20_000  # of 1 to 2 KB each
GRAMMAR_SIZE = 250_000  # symbols


def limits() -> dict[str, int | bool]:
    """Return the limits by llguidance's names."""
    return {
        "initial_lexer_fuel": LEXER_FUEL, "step_lexer_fuel": STEP_FUEL, "step_max_items": STEP_ITEMS,
        "max_lexer_states": LEXER_STATES, "max_grammar_size": GRAMMAR_SIZE, "verbose_errors": False,
    }  # fmt: skip


def parser_limits() -> "LLParserLimits":
    """Return the limits as llguidance takes them."""
    from llguidance import LLParserLimits

    return LLParserLimits(**limits())
