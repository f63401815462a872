"""Tokenizers of every kind, made once for all tests here."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.vocabularies import KINDS


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each kind of tokenizer, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("tokenizer")
            KINDS[kind](made[kind])
        return made[kind]

    return make
