"""The text on which precisions are measured: bounded, in UTF-8, and of a size that fills a window."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import ConfigError
from millrace.evaluate.calibration import TOKENS, VARIED, Calibration
from millrace.evaluate.sizes import LENGTH, SHORTEST
from millrace.evaluate.text_windows import Windows


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Checkpoint.open(BUNDLED / "tiny").tokenizer


def test_the_bundled_text_has_more_than_one_register() -> None:
    found = Calibration.open(None)
    assert found.kind == "bundled" and 12_000 < len(found.content.encode()) < 17_000
    for part in ("Ada", "def push", "User:", "| 2019 |", "SELECT", "Mühle", "水車", "春天", "Вечером"):
        assert part in found.content


def test_windows_are_spread_over_the_text(tokenizer: Tokenizer) -> None:
    found = Calibration.open(None)
    text, ids = found.windows(tokenizer, 8192), tokenizer.encode(found.content)
    assert text.ids.size == TOKENS and text.first == LENGTH // 4
    count = len(ids) // LENGTH
    assert count > 3
    starts = [i for i in range(count) if ids[i * LENGTH + 1 : (i + 1) * LENGTH] in text.ids[:, 1:].tolist()]
    assert starts[0] == 0 and starts[-1] == count - 1 and len(starts) == 3
    short = found.windows(tokenizer, 100)
    assert short.ids.shape == (TOKENS // 100, 100)


@pytest.mark.parametrize(("context", "n"), [(8192, 3), (100, TOKENS // 100)])
def test_what_is_held_out_has_none_of_those_windows(tokenizer: Tokenizer, context: int, n: int) -> None:
    """Whole windows of the text, as many, and others; of a text with no more there are none."""
    found = Calibration.open(None)
    chosen, others = found.windows(tokenizer, context), found.held_out(tokenizer, context)
    assert others is not None and others.ids.shape == chosen.ids.shape == (n, min(context, LENGTH))
    assert others.first == chosen.first and len({row.tobytes() for row in others.ids}) == n
    assert not {row.tobytes() for row in others.ids} & {row.tobytes() for row in chosen.ids}
    length, ids = others.ids.shape[1], tokenizer.encode(found.content)
    every = [ids[i * length + 1 : (i + 1) * length] for i in range(len(ids) // length)]
    assert all(row in every for row in others.ids[:, 1:].tolist())
    three = Calibration(found.content[: len(found.content) // 5])
    assert len(three.windows(tokenizer, context).ids) >= 2 and (three.held_out(tokenizer, 8192) is None)


def test_a_text_of_ones_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Das Rad drehte sich den ganzen Tag. " * 40)
    found = Calibration.open(str(file))
    assert found.kind == "own" and found.digest != Calibration.open(None).digest
    assert len(found.windows(tokenizer, 64).ids) > 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"), (b" \n\t ", "is empty"), ("Wörter ".encode("latin-1") * 900, "not UTF-8: byte 0xf6 at 1"),
        ("Слова ".encode("koi8-r") * 900, "not UTF-8"), (b"\xff\xfe" + "words ".encode("utf-16-le") * 90, "not UTF-8"),
        (b"a" * ((1 << 20) + 1), "more than 1 MiB"),
    ],
)  # fmt: skip
def test_what_is_no_text(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        Calibration.open(str(file))
    assert str(refused.value).startswith(f"--calibration {file} ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot read --calibration"):
            Calibration.open(str(path))


def test_too_few_tokens_for_a_window(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "text"
    file.write_text("Once upon a time.")
    with pytest.raises(ConfigError, match=r"has \d+ tokens of this model") as refused:
        Calibration.open(str(file)).windows(tokenizer, 2048)
    assert refused.value.expected == "at least 512, one window"
    with pytest.raises(ConfigError, match="too short to measure"):
        Calibration.open(None).windows(tokenizer, SHORTEST - 1)
    few = Calibration(
        "Once upon a time there was a little dog, and it was happy all day long."
    )  # bundled: the window is cut shorter
    assert few.windows(tokenizer, 2048).ids.shape[0] == 1


def test_a_text_of_one_letter_tells_nothing_of_a_precision(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("a" * 20_000)
    with pytest.raises(ConfigError, match=r"a.txt has [12] different tokens"):
        Calibration.open(str(tmp_path / "a.txt")).windows(tokenizer, 64)


@pytest.mark.parametrize(
    ("file", "said"), [(None, "the bundled text has 3 different"), ("b", "--calibration b has 3 ")]
)
def test_the_beginning_of_a_text_counts_for_nothing(file: str | None, said: str) -> None:
    """It is the tokenizer's own, not the text's: with four of these there is something to predict."""

    def read(n: int) -> Windows:
        own = SimpleNamespace(encode=lambda text: [*range(5, 5 + n)] * 400, bos_token_id=1, special_around=(1, 0))
        return Calibration("text", Path(file) if file else None).windows(cast(Tokenizer, own), 64)

    with pytest.raises(ConfigError, match=said):
        read(VARIED - 1)
    assert set(read(VARIED).ids[:, 0]) == {1} and len(set(read(VARIED).ids.ravel())) == VARIED + 1
