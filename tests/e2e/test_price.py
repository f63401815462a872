"""What a precision costs, as Python users hear of it."""

import logging

import pytest

from millrace import LLM
from millrace.errors import ConfigError


def test_whoever_opens_it_hears_of_the_price(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millrace")
    for times in (1, 2):
        LLM("tiny", precision="w8a8", max_context=64, tune=0).close()
        assert [r.message.startswith("w8a8 g128: KL 0.") for r in caplog.records] == [True] * times


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precision": "auto", "evaluate": False}, "precision=auto measures what precisions cost"),
        ({"precision": "auto", "evaluate": False}, "cannot be: evaluate=False was given"),
        ({"max_kl": 0.1}, "max_kl is given without precision=auto"),
        (
            {"precision": "auto", "max_kl": 1e-9, "max_context": 1},
            "build for a longer max_context, or name a precision",
        ),
        ({"precision": {"default": "auto"}}, '"auto" is unknown'),
    ],
)
def test_mistakes_are_said_in_python_words(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM("tiny", tune=0, **given)  # type: ignore[arg-type]
    assert said in str(refused.value) and "--" not in str(refused.value)
