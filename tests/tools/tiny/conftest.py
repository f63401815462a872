"""One tokenizer for all tests of the recipe: training it takes some seconds."""

import pytest
from tokenizers import Tokenizer

from tools.tiny.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer()
