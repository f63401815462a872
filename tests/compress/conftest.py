"""`tiny`, calibrated on the first part of a text and judged on another: what several files ask of a trained model."""

from typing import NamedTuple

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.find import BUNDLED
from millrace.compile.source import Source
from millrace.compress.calibrated import statistics_of
from millrace.compress.collect import samples
from millrace.compress.measure import Reference
from millrace.compress.statistics import Statistics

TEXT = (BUNDLED / "calibration.txt").read_text()
CUT = 2 * len(TEXT) // 3


class Trained(NamedTuple):
    """reference: of the part that nothing was fitted to"""

    checkpoint: Checkpoint
    source: Source
    statistics: Statistics
    reference: Reference


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    checkpoint = Checkpoint.open(BUNDLED / "tiny")
    text, held_out = (
        samples(checkpoint.tokenizer, TEXT[:CUT], 16, 128),
        samples(checkpoint.tokenizer, TEXT[CUT:], 4, 128),
    )
    found = statistics_of(checkpoint, text, tmp_path_factory.mktemp("tiny") / "s", lambda *_: None)
    reference = Reference.of(checkpoint, held_out)
    return Trained(checkpoint, reference.source, found, reference)
