"""Failures that are known and reported, by target: they are counted, and do not fail a run. Shrinks only."""

import re

from tests.fuzz.driver import Failure

# long and unprintable messages: until what came from a file or a request is cleaned and shortened in one place
_MESSAGE = "^message: "
KNOWN: dict[str, tuple[str, ...]] = {
    "safetensors": (_MESSAGE,),
    "gguf": (_MESSAGE,),
    "config": (
        _MESSAGE, "TypeError in config.py:_family", "UnicodeEncodeError in tokenizer_json.py:_add_tokens",
        "OverflowError in generation.py:_number",
    ),
    "tokenizer": (
        _MESSAGE, "UnicodeDecodeError in tokenizer_model.py", "PanicException in tokenizer_json.py",
    ),
    "program": (_MESSAGE,),
    "requests": (_MESSAGE,),
}  # fmt: skip


def is_known(failure: Failure) -> bool:
    name = failure.target.partition(":")[2]
    return any(re.search(pattern, f"{failure.kind}: {failure.detail}") for pattern in KNOWN.get(name, ()))
