"""Accuracy loss of a precision, as stored in the engine manifest: figures relative to float32, and their origin."""

from typing import Annotated, Literal

import msgspec

# Rounding may make a KL of zero slightly negative.
Kl = Annotated[float, msgspec.Meta(ge=-0.01, le=1e4)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_DIGITS = 3  # stored digits: further ones differ between processors and are not significant


class AccuracyLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loss of one choice of precisions, relative to the same checkpoint in float32 with a float32 KV cache.

    A field is None if there is no such number: some answers are not finite, or its weights cannot be rounded
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    kl: Kl | None  # KL(float32 || this), nats per token on average
    perplexity_ratio: Annotated[float, msgspec.Meta(gt=0, le=1e300)] | None  # relative to float32's
    agreement: Share  # share of positions at which the most likely token is float32's
    weights_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # that a step reads at least

    @property
    def figures(self) -> str:
        """Return the figures as text."""
        if self.kl is None or self.perplexity_ratio is None:
            return "no KL, because not all logits are finite"
        ratio = f"{self.perplexity_ratio:.3f}" if self.perplexity_ratio < 1000 else f"{self.perplexity_ratio:.3g}"
        return f"KL {self.kl:.3g} nats per token, perplexity x {ratio}, same most likely token in {self.agreement:.1%}"

    def within(self, bound: float) -> bool:
        return self.kl is not None and self.kl <= bound


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the precision was chosen. The default describes an engine that was built without measuring."""

    not_measured: str = "not requested"  # the reason; "" if it was measured
    text: Literal["", "bundled", "own"] = ""  # the text on which it was measured
    digest: str = ""  # of that text
    tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0  # predicted ones
    window: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0  # tokens per window; 0: not recorded
    max_kl: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = (
        None  # None: the precision was requested, whatever its loss
    )
    tried: Annotated[list[AccuracyLoss], msgspec.Meta(max_length=64)] = []  # the last one is the engine's

    @property
    def chosen_loss(self) -> AccuracyLoss | None:
        """The engine's loss; None if it was not measured."""
        return self.tried[-1] if self.tried else None

    @property
    def summary(self) -> str:
        """Return the evaluation in one line."""
        if self.chosen_loss is None:
            return f"not measured: {self.not_measured or 'no reason recorded'}"
        text = "the bundled text" if self.text == "bundled" else "the user's text"
        cut = f" in windows of {self.window}" if self.window else ""
        where = f"on {self.tokens:,} tokens{cut} of {text}, compared with fp32"
        if self.max_kl is None:
            return f"{self.chosen_loss.name}: {self.chosen_loss.figures} ({where})"
        over = ", ".join(f"{p.name} {'none' if p.kl is None else format(p.kl, '.3g')}" for p in self.tried[:-1])
        choice = f"auto chose {self.chosen_loss.name}: {self.chosen_loss.figures}"
        return f"{choice} ({where}; bound {self.max_kl:g}" + (f"; rejected: {over})" if over else ")")

    @property
    def texts(self) -> list[str]:
        """Return all strings that may be displayed."""
        return [self.not_measured, self.digest, *(p.name for p in self.tried)]


def rounded(x: float) -> float | None:
    """Round a figure as it is stored and compared with a bound; None if it is not finite."""
    result = float(f"{x:.{_DIGITS}g}")
    return result if abs(result) < float("inf") else None
