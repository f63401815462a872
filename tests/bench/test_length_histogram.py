"""Lengths drawn from counts: as often as the counts say, by seed, from each of the files that hold them."""

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.load.length_histogram import LengthHistogram, histogram_to_dict, read_histogram
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.run.plan import make_plan
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import ConfigError

N = 20_000
TOLD = {"isl_edges": [1, 64, 129], "osl_edges": [1, 3, 200], "counts": [[5, 0], [1, 4]]}


LINE = '{"input_length": 5, "output_length": 5}\n'


def told(**more: object) -> str:
    return json.dumps({**TOLD, **more})


def written(folder: Path, text: str) -> Path:
    path = folder / "h.json"
    path.write_text(text)
    return path


def test_bins_come_as_often_as_they_were_counted(tmp_path: Path) -> None:
    found = read_histogram(written(tmp_path, json.dumps(TOLD)))
    rng = random.Random(1)
    drawn = np.array([found.draw(rng) for _ in range(N)])
    first, last = drawn[drawn[:, 0] < 64], drawn[drawn[:, 1] >= 3]
    assert len(first) / N == pytest.approx(0.5, abs=0.015) and len(last) / N == pytest.approx(0.4, abs=0.015)
    assert set(first[:, 1]) == {1, 2} and set(drawn[:, 0]) == set(range(1, 129)), "both ends, and none beyond"
    assert (last[:, 0].min(), last[:, 0].max(), last[:, 1].min(), last[:, 1].max()) == (64, 128, 3, 199)
    counts = np.bincount(first[:, 0])[1:64]
    expected = len(first) / 63
    assert float(((counts - expected) ** 2 / expected).sum()) < 103, "evenly within a bin: chi2 of 62, 99.9 %"


def test_lines_of_a_trace_and_of_a_result_are_their_own_lengths(tmp_path: Path) -> None:
    trace = [{"timestamp": 0, "input_length": n, "output_length": m} for n, m in ((7, 1), (7, 1), (90, 0))]
    found = read_histogram(written(tmp_path, "\n".join(map(json.dumps, trace)) + "\n\n"))
    assert found == LengthHistogram([(7, 7, 1, 1), (90, 90, 1, 1)], [2, 3])
    result = [
        {"n_prompt": 5, "n_output": 2, "failure": None}, {"n_prompt": 6, "n_output": 0, "failure": "timeout"},
        {"n_prompt": None, "n_output": 3, "failure": None},
    ]  # fmt: skip
    assert read_histogram(written(tmp_path, "\n".join(map(json.dumps, result)))).bins == [(5, 5, 2, 2)]


@pytest.mark.parametrize("n_lengths", [3, 500])
def test_what_a_result_writes_is_read_again(tmp_path: Path, n_lengths: int) -> None:
    rng = random.Random(2)
    lengths = [(rng.randint(1, n_lengths) * 7, rng.randint(1, n_lengths)) for _ in range(3000)]
    answers = [BenchRecord(n_prompt=n, n_reported=m) for n, m in lengths]
    answers += [
        BenchRecord(n_prompt=9999, n_reported=5, failure=Failure.TIMEOUT),
        BenchRecord(n_reported=5),
        BenchRecord(n_prompt=5, n_reported=0),
    ]
    found_in = histogram_to_dict(answers)
    assert found_in is not None
    (tmp_path / "histogram.json").write_text(json.dumps(found_in))
    found = read_histogram(tmp_path)
    assert found.upto[-1] == 3000
    counted = dict(zip(found.bins, np.diff(found.upto, prepend=0).tolist(), strict=True))
    for (low, high, out_low, out_high), n in counted.items():
        assert n == sum(low <= a <= high and out_low <= b <= out_high for a, b in lengths)
    if n_lengths == 3:
        assert {(b[0], b[2]): n for b, n in counted.items()} == Counter(lengths), "few lengths are kept as they are"
    assert histogram_to_dict([BenchRecord(n_reported=5)]) is None


def test_sessions_have_the_lengths_of_the_file_and_of_the_seed(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(TOLD))

    def drawn(seed: int) -> list[tuple[int, int | None, int]]:
        what = InputSettings(input_histogram=str(path))
        load = LoadSettings(random_seed=seed)
        plan = make_plan("http://x", TargetSettings(), load, what, SessionSettings())
        turns = [s.turns[0] for s in islice(plan.sessions(PromptWords()), 200)]
        return [(t.n_input or 0, t.max_tokens, len(t.text.split())) for t in turns]

    assert drawn(1) == drawn(1) != drawn(2)
    assert all(n_input == n_words for n_input, _, n_words in drawn(1))
    assert {(n >= 64, m >= 3) for n, m, _ in drawn(1) if m is not None} == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "not JSON"), ("[1]", "no JSON object"), ("{}", '"isl_edges" is None'),
        (told(isl_edges=[1]), "isl_edges"), (told(isl_edges=[0, 5, 9]), "from 1"),
        (told(osl_edges=[1, 5, 5]), "that grow"), (told(osl_edges=[1, 2.5, 5]), "whole"),
        (told(counts=[[1, 2]]), "2 lists of 2"), (told(counts=[[1], [2]]), "2 lists of 2"),
        (told(counts=[[1, -1], [2, 0]]), "2 lists"), (told(counts=[[0, 0], [0, 0]]), "all 0"),
        (LINE + '{"input_length": 5}\n', "line 2"), (LINE + "\n[]\n", "line 3"),
        (LINE + '{"input_length": -5, "output_length": 1}\n', "line 2: the lengths (-5, 1)"),
        ('{"n_prompt": null, "n_output": 5}\n', "no request with its lengths"),
    ],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_histogram(written(tmp_path, text))
    assert says in str(caught.value) and "h.json" in str(caught.value)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    path = str(written(tmp_path, json.dumps(TOLD)))
    for more in ({"pattern": ("5/5",)}, {"input_file": path}, {"isl": 5.0}, {"osl": 5.0}):
        with pytest.raises(ConfigError, match="beside"):
            what = InputSettings(input_histogram=path, **more)
            make_plan("http://x", TargetSettings(), LoadSettings(), what, SessionSettings())
    with pytest.raises(ConfigError, match="cannot be read"):
        read_histogram(tmp_path / "absent")
