"""What an engine's manifest may say of a price: figures that can be, for a manifest may come from anybody."""

from typing import Any

import msgspec
import pytest

from millrace.engine.artifact.accuracy_loss import Evaluation

PRICE = {"name": "w8a8 g128", "kl": 0.0138, "perplexity_ratio": 1.03, "agreement": 0.958, "weights_bytes": 5_000_000}
WHOLE = {"not_measured": "", "text": "bundled", "digest": "ab", "tokens": 1149, "max_kl": 0.1, "tried": [PRICE]}


def decoded(**changed: Any) -> Evaluation:
    own = {**PRICE, **{name: value for name, value in changed.items() if name in PRICE}}
    rest = {name: value for name, value in changed.items() if name not in PRICE}
    return msgspec.convert({**WHOLE, "tried": [own], **rest}, Evaluation)


def test_what_can_be_is_taken() -> None:
    assert "auto chose w8a8 g128: KL 0.0138" in decoded().summary
    assert decoded(kl=-1e-9).chosen_loss and decoded(kl=None, perplexity_ratio=None).chosen_loss
    assert (
        "perplexity x 1e+30," in decoded(perplexity_ratio=1e30).summary
        and len(decoded(perplexity_ratio=1e30).summary) < 300
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"kl": -1e300}, {"kl": 1e5}, {"perplexity_ratio": -5}, {"perplexity_ratio": 0}, {"agreement": 1.1},
        {"weights_bytes": -1}, {"name": ""}, {"max_kl": -1}, {"max_kl": 101}, {"tokens": -1}, {"tried": [PRICE] * 65},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(**changed)
