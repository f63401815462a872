"""What of `examples/ocr` needs no network: its configurations as `millrace lint` reads them, and how lines are read."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from millrace.model_repository.repository import repository_reader
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from tests.support.python_models import loaded

MODELS = Path(__file__).parents[2] / "examples" / "ocr" / "models"
NETWORKS = ("detector", "classifier", "recogniser")
N_CHARACTERS = 6625  # that the recogniser's output has


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """As `put_models.py` leaves them, with files that are no networks."""
    shutil.copytree(MODELS, tmp_path / "models", ignore=shutil.ignore_patterns("*.onnx", "characters.txt"))
    for name in (*NETWORKS, "ocr"):
        (tmp_path / "models" / name / "1").mkdir(exist_ok=True)
    for name in NETWORKS:
        (tmp_path / "models" / name / "1" / "model.onnx").touch()
    characters = "".join(f"{chr(0x4E00 + i)}\n" for i in range(N_CHARACTERS - 2))
    (tmp_path / "models" / "read" / "1" / "characters.txt").write_text(characters)
    return tmp_path / "models"


def test_every_model_of_it_can_be_served(models: Path) -> None:
    read = [repository_reader.read_model([models], name) for name in repository_reader.model_names([models])]
    assert len(read) == 9
    for model in read:
        assert model is not None and model.is_servable and not model.problems, model


def test_lines_are_read(models: Path) -> None:
    """What repeats is one character unless nothing stands between; a line of nothing, or of guesses, is left out."""
    surely = {(0, 0): 3, (0, 1): 3, (0, 2): 0, (0, 3): 3, (0, 4): N_CHARACTERS - 1, (1, 0): 0, (2, 1): 5}
    sureness = np.full((3, 5, N_CHARACTERS), 1e-5, np.float32)
    sureness[:, :, 0] = 0.2
    for (line, place), character in surely.items():
        sureness[line, place, character] = 0.4 if line == 2 else 0.9
    boxes = np.arange(24, dtype=np.float32).reshape(3, 4, 2)

    async def run() -> dict[str, np.ndarray]:
        async with loaded(models) as repository:
            await repository.load("read")
            model, request = repository.get("read"), InferRequest({})
            given = [
                RawInput("CHARACTERS", "FP32", sureness.shape, sureness),
                RawInput("BOX", "FP32", boxes.shape, boxes),
            ]
            model.checker.attach_inputs(request, given)
            return dict((await model.infer(request)).outputs)

    answer = asyncio.run(run())
    assert [text.decode() for text in answer["TEXT"]] == [f"{chr(0x4E02)}{chr(0x4E02)} "]
    assert np.allclose(answer["SCORE"], 0.9) and np.array_equal(answer["BOX"], boxes[:1])
