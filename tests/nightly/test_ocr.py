"""The example `examples/ocr` on PP-OCRv4's networks: the words that rapidocr reads with the same ones."""

import io
import json
import random
import runpy
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.kserve import HEADER, binary, infer, parts
from tests.support.repository import in_process

pytestmark = pytest.mark.nightly
EXAMPLE = Path(__file__).parents[2] / "examples" / "ocr"
PIPELINES = ("ocr", "ocr_bls")
WORDS = ("Mill", "grain", "Total", "counts", "street", "wheel", "Saturday", "barley", "flour", "weigh")
NEAR = 4  # pixels between the corners of two who find the same line


def drawn(lines: Sequence[tuple[str, int, int, int, int]], size: tuple[int, int] = (640, 480)) -> bytes:
    """A PNG file with these lines: text, x, y, size of the letters, degrees by which it is turned."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("RGB", size, "white")
    for text, x, y, letters, degrees in lines:
        font = ImageFont.load_default(letters)
        left, top, right, bottom = (int(edge) for edge in ImageDraw.Draw(page).textbbox((0, 0), text, font=font))
        piece = Image.new("RGB", (right - left + 8, bottom - top + 8), "white")
        ImageDraw.Draw(piece).text((4 - left, 4 - top), text, fill="black", font=font)
        page.paste(piece.rotate(degrees, expand=True), (x, y))
    file = io.BytesIO()
    page.save(file, "PNG")
    return file.getvalue()


def pages(n: int) -> list[bytes]:
    """Each of some lines of letters of several sizes, every third of which stands on its head."""
    found = []
    for seed in range(n):
        rng, lines, y = random.Random(seed), [], 20
        for i in range(rng.randint(1, 7)):
            letters, text = rng.randint(24, 34), " ".join([*rng.sample(WORDS, 2), f"{rng.randint(10, 9999)}"])
            lines.append((text, rng.randint(10, 60), y, letters, 180 if i % 3 == 2 else 0))
            y += 2 * letters
        found.append(drawn(lines))
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("rapidocr_onnxruntime", reason="rapidocr-onnxruntime is not installed")
    models = tmp_path_factory.mktemp("ocr") / "models"
    shutil.copytree(EXAMPLE / "models", models)
    runpy.run_path(str(EXAMPLE / "put_models.py"))["put"](models)
    with in_process(models) as served:
        yield served.url


@pytest.fixture(scope="module")
def rapidocr() -> Any:
    from rapidocr_onnxruntime import RapidOCR

    return RapidOCR()


def read(url: str, model: str, page: bytes) -> tuple[list[str], NDArray[np.float32], NDArray[np.float32]]:
    """Texts, how sure they are, and their boxes."""
    raw = struct.pack("<I", len(page)) + page
    image = {"name": "IMAGE", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    body, headers = binary([image], raw)
    told, _ = parts(httpx.post(f"{url}/v2/models/{model}/infer", content=body, headers=headers, timeout=60))
    found = {output["name"]: output["data"] for output in told["outputs"]}
    return found["TEXT"], np.array(found["SCORE"], np.float32), np.array(found["BOX"], np.float32).reshape(-1, 4, 2)


def letters(texts: Iterable[str]) -> list[str]:
    """Without spaces, which the recogniser sees or does not by a fraction of a pixel."""
    return [text.replace(" ", "") for text in texts]


@pytest.mark.parametrize("model", PIPELINES)
def test_the_words_of_rapidocr(model: str, url: str, rapidocr: Any) -> None:
    """Eight pages, four at a time: the same lines, in its order, where it sees them."""
    drawn_pages = pages(8)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda page: read(url, model, page), drawn_pages))
    n_turned = 0
    for page, (texts, scores, boxes) in zip(drawn_pages, answers, strict=True):
        exact = rapidocr(page)[0]
        assert letters(texts) == letters(text for _, text, _ in exact)
        assert np.abs(boxes - np.array([box for box, _, _ in exact])).max() <= NEAR
        assert np.abs(scores - [score for _, _, score in exact]).max() < 0.1
        n_turned += len(texts) // 3
    assert n_turned > 5


@pytest.mark.parametrize("model", PIPELINES)
def test_a_line_that_runs_upwards(model: str, url: str, rapidocr: Any) -> None:
    page = drawn([("upwards 42", 300, 60, 30, 90)])
    assert letters(read(url, model, page)[0]) == letters(text for _, text, _ in rapidocr(page)[0]) == ["upwards42"]


@pytest.mark.parametrize("model", PIPELINES)
def test_a_page_without_text_and_what_is_no_page(model: str, url: str, rapidocr: Any) -> None:
    blank = drawn([])
    assert rapidocr(blank)[0] is None
    texts, scores, boxes = read(url, model, blank)
    assert texts == [] and scores.shape == (0,) and boxes.shape == (0, 4, 2)
    image = {"name": "IMAGE", "datatype": "BYTES", "shape": [1], "data": ["no picture"]}
    answer = infer(url, model, {"inputs": [image]})
    assert answer.status_code >= 400 and "IMAGE holds no image" in answer.json()["error"]


def test_a_picture_alone_as_curl_sends_it(url: str) -> None:
    page = drawn([("Mill street 7", 40, 40, 30, 0)])
    answer = httpx.post(f"{url}/v2/models/ocr/infer", content=page, headers={HEADER: "0"}, timeout=60)
    told, raw = parts(answer)
    assert [output["name"] for output in told["outputs"]] == ["TEXT", "SCORE", "BOX"]
    assert raw[4 : 4 + struct.unpack_from("<I", raw)[0]].replace(b" ", b"") == b"Millstreet7"


def test_lines_of_several_clients_are_classified_together(url: str) -> None:
    def batches() -> dict[int, int]:
        (stats,) = httpx.get(f"{url}/v2/models/classifier/stats").json()["model_stats"]
        return {one["batch_size"]: one["compute_infer"]["count"] for one in stats["batch_stats"]}

    def classified(i: int) -> list[str]:
        raw = np.random.default_rng(i).uniform(-1, 1, (1, 3, 48, 192)).astype(np.float32).tobytes()
        line = {"name": "x", "datatype": "FP32", "shape": [1, 3, 48, 192], "parameters": {"binary_data_size": len(raw)}}
        asked = [{"name": "save_infer_model/scale_0.tmp_1", "parameters": {"classification": 1}}]
        told, _ = parts(infer(url, "classifier", *binary([line], raw, outputs=asked)))
        return list(told["outputs"][0]["data"])

    before = batches()
    with ThreadPoolExecutor(16) as threads:
        labels = list(threads.map(classified, range(48)))
    assert all(label.rpartition(":")[2] in ("0", "180") for (label,) in labels)
    after = batches()
    assert any(after[size] > before.get(size, 0) for size in after if size > 1), json.dumps(after)
