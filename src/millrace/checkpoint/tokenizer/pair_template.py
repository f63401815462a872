"""How a tokenizer joins two texts for a cross-encoder: special tokens around each, and the types of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import CheckpointError, RequestError


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """`before`, the first text, `between`, the second text, `after`: token ids.

    second_type: type of the tokens from the second text on, 0 or 1; the tokens before it have type 0
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    second_type: int

    @property
    def n_special(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Sequence[int], second: Sequence[int], max_tokens: int | None = None) -> tuple[list[int], int]:
        """Return the token ids of two texts, and how many of these have type 0.

        first, second: ids without special tokens; max_tokens: shorten the longer text until all fit, None: never
        raises RequestError if the special tokens alone are more
        """
        if max_tokens is not None:
            if max_tokens < self.n_special:
                raise RequestError(
                    f"truncate_prompt_tokens is {max_tokens}",
                    f"at least {self.n_special}, the special tokens of a pair of texts", "raise it",
                    param="truncate_prompt_tokens",
                )  # fmt: skip
            n_first, n_second = _longest_first(len(first), len(second), max_tokens - self.n_special)
            first, second = first[:n_first], second[:n_second]
        head = [*self.before, *first, *self.between]
        ids = [*head, *second, *self.after]
        return ids, len(head) if self.second_type else len(ids)


def _longest_first(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """Return the lengths of two texts shortened to `max_tokens`.

    source: tokenizers 0.23, utils/truncation.rs, TruncationStrategy::LongestFirst
    """
    shorter, longer = sorted((first, second))
    if shorter + longer > max_tokens:
        longer = shorter if shorter > max_tokens else max(shorter, max_tokens - shorter)
        if shorter + longer > max_tokens:
            shorter, longer = max_tokens // 2, max_tokens // 2 + max_tokens % 2
    return (longer, shorter) if first > second else (shorter, longer)


def pair_template(ids: Sequence[int], types: Sequence[int], texts: Sequence[int | None], path: object) -> PairTemplate:
    """Return the template of an encoded pair.

    ids, types: of its tokens; texts: number of each token's text, 0 or 1, None for a special token; path: for errors
    raises CheckpointError if the texts are not in order, or types are other than BERT's
    """
    first, second = ([i for i, text in enumerate(texts) if text == number] for number in (0, 1))
    starts_second = second[0] if second else 0
    expected = [int(i >= starts_second) for i in range(len(ids))]
    if not first or not second or first[-1] > second[0] or list(types) not in ([0] * len(ids), expected):
        raise CheckpointError(
            f"{path}: the post-processor gives a pair of texts the types {list(types)!r:.200}",
            "the first text, then the second; types 0, or 1 from the second text on", "choose another cross-encoder",
        )  # fmt: skip
    return PairTemplate(
        tuple(ids[: first[0]]), tuple(ids[first[-1] + 1 : second[0]]), tuple(ids[second[-1] + 1 :]), max(types)
    )
