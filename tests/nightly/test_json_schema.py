"""Random answers, held to random schemas at the limits of their numbers, are valid for the `jsonschema` package."""

import json
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from millrace.errors import RequestError
from millrace.kernels.sample.ref import unpacked
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output.grammar import GrammarCompiler
from tests.fuzz.schemas import random_schema
from tests.serve.support import VOCABULARY, tokenizer

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]
N = 10_000
MOST = 200  # tokens of an answer
# Its remainders are those of float64: 3 is no multiple of 1e-9.
FLOATS = "multipleOf"


def answer(grammars: GrammarCompiler, rng: Random, schema: dict[str, Any]) -> bytes | None:
    """Draw one, each allowed token as likely as any other; None if it has no end within MOST tokens."""
    words = tokenizer()
    (matcher,) = grammars.matchers(StructuredOutputsParams(json=schema), 1)
    said = b""
    for _ in range(MOST):
        allowed = np.flatnonzero(unpacked(grammars.masks([matcher])[0], VOCABULARY))
        if matcher.error or not len(allowed):
            return None
        if words.eos_token_id in allowed and (len(allowed) == 1 or rng.random() < 0.7):
            return said
        token = int(rng.choice([token for token in allowed if token != words.eos_token_id]))
        said += words.token_bytes(token)
        matcher.accept(token)
    return None


def test_random_answers_are_valid() -> None:
    words = tokenizer()
    assert words.eos_token_id is not None
    grammars, seen = GrammarCompiler(words, VOCABULARY, [words.eos_token_id]), Counter[str]()
    for seed in range(N):
        rng = Random(f"schema {seed}")
        schema = random_schema(rng, 2)
        try:
            said = answer(grammars, rng, schema)
        except RequestError:
            seen["refused"] += 1
            continue
        if said is None:
            seen["without an end"] += 1
            continue
        errors = jsonschema.Draft202012Validator(schema).iter_errors(json.loads(said))
        wrong = [error.message for error in errors if error.validator != FLOATS]
        assert not wrong, (seed, said, wrong, schema)
        seen["valid"] += 1
    assert seen["valid"] > N // 8 and seen["refused"] > N // 8, seen
