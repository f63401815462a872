"""Pairs of texts, which a cross-encoder reads as one sequence."""

from collections.abc import Sequence

from millrace.checkpoint.tokenizer.pair_template import PairTemplate
from millrace.engine.encoder_inputs import Ids
from millrace.errors import RequestError
from millrace.runtime.encoder_loop import EncoderLimits, check_ids, truncation


def check_counts(first: int, second: int, names: tuple[str, str]) -> None:
    """Check the numbers of texts: one for all, or pairs. names: of the two arguments. raises RequestError"""
    if first not in (1, second):
        raise RequestError(
            f"{names[0]} has {first} texts, and {names[1]} {second}", f"one in {names[0]}, or as many as in {names[1]}",
            "send one text, or pairs", names[0],
        )  # fmt: skip


def join_texts(
    template: PairTemplate, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]], limits: EncoderLimits,
    truncate: int | None, name: str,
) -> tuple[list[Ids], list[int]]:  # fmt: skip
    """Return the sequence of each text of `second` with its text of `first`, and the tokens of type 0 of each.

    first: one text, or as many as in `second`; ids without special tokens. truncate: as truncate_prompt_tokens
    name: of `second` in errors. raises RequestError
    """
    max_tokens = truncation(truncate, limits.max_context)
    sequences, n_first = [], []
    for i, text in enumerate(second):
        ids, n = template.join(first[i % len(first)], text, max_tokens)
        sequences.append(check_ids(ids, limits, f"the pair of {name} {i}", name))  # at once: pairs may be very long
        n_first.append(n)
    return sequences, n_first
