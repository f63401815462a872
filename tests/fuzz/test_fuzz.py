"""Some cases of each target in every run of the tests; a hundred thousand by night, with advancing seeds."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from millrace.checkpoint.gguf.tensors import GgufTensors
from millrace.graph.types import Array
from tests.fuzz import broken, targets
from tests.fuzz.driver import Limits, fuzz, random_of
from tests.fuzz.known import is_known
from tests.fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from tests.fuzz.originals import CONFIG
from tests.fuzz.request_bodies import BODIES, Endpoints
from tests.fuzz.targets import TARGETS

CASES = {
    "safetensors": 60,
    "gguf": 60,
    "config": 60,
    "sentences": 60,
    "tokenizer": 60,
    "program": 60,
    "gpu_engines": 20,
    "requests": 150,
    "pbtxt": 60,
    "tensors": 100,
    "structured": 40,
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_opens_or_says_what_is_wrong(name: str) -> None:
    found = [str(f) for f in fuzz(TARGETS[name], 0, 0, CASES[name]) if not is_known(f)]
    assert not found, "\n".join(found[:10])


NOTICED = {
    "raises": ("raised", "ValueError"), "aborts": ("crashed", "-6"), "reads_nowhere": ("crashed", "-11"),
    "hangs": ("hung", "no end"), "is_slow": ("slow", "processor time"), "says_much": ("message", "characters"),
    "says_escapes": ("message", "not printable"), "takes_much": ("memory", "for one case"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOTICED)
def test_what_breaks_the_property_is_noticed(name: str) -> None:
    """With its seed and its place, and the cases behind it are run."""
    kind, detail = NOTICED[name]
    limits = {"hangs": Limits(hung_s=1.5), "is_slow": Limits(slow_s=0.5)}.get(name, Limits())
    found = list(fuzz(f"tests.fuzz.broken:{name}", 5, 0, broken.BAD + 3, limits))
    assert [(f.seed, f.index, f.kind) for f in found] == [(5, broken.BAD, kind)]
    assert detail in found[0].detail


def test_memory_that_is_kept_is_noticed() -> None:
    (found,) = fuzz("tests.fuzz.broken:keeps", 5, 0, 200)
    assert found.kind == "memory" and "more than after" in found.detail


def test_a_case_is_a_function_of_seed_and_index() -> None:
    def case(seed: int, index: int) -> tuple[bytes, bytes]:
        rng = random_of(seed, index)
        return mutate_bytes(rng, bytes(range(200))), json_bytes(rng, mutate_json(rng, CONFIG))

    made = [case(seed, index) for seed in (0, 1) for index in range(200)]
    assert made == [case(seed, index) for seed in (0, 1) for index in range(200)]
    assert len({data for data, _ in made}) > 350 and len({text for _, text in made}) > 350


def test_mutations_leave_the_original_alone() -> None:
    before = repr(CONFIG)
    for seed in range(300):
        mutate_json(Random(seed), CONFIG)
    assert repr(CONFIG) == before


def test_good_bodies_are_answered() -> None:
    """Otherwise what is mutated would be refused for what was wrong before, and nothing behind that be reached."""
    endpoints = Endpoints()
    answers = [endpoints.take(kind, msgspec.json.encode(good)) for kind, good in BODIES]
    told = [msgspec.json.decode(answer) for answer in answers if answer is not None]
    assert [sorted(one)[0] for one in told] == ["count", "count", "count", "prompt", "prompt"]
    assert told[1]["token_strs"] and len(told[2]["tokens"]) > 100


@pytest.mark.parametrize("name", ["gguf", "config", "tokenizer", "requests"])
def test_what_is_not_broken_opens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a case is refused for what its mutation did, and the others reach what lies behind."""
    monkeypatch.setattr(targets, "mutate_bytes", lambda rng, data: data)
    monkeypatch.setattr(targets, "mutate_json", lambda rng, value: value)
    monkeypatch.setattr(targets, "json_bytes", lambda rng, value: msgspec.json.encode(value))
    loaded: set[str] = set()
    load = GgufTensors.load

    def noted(self: GgufTensors, name: str) -> Array:
        loaded.add(self._stored[name].type.name)
        return load(self, name)

    monkeypatch.setattr(GgufTensors, "load", noted)
    case = getattr(targets, name)(tmp_path)
    for index in range(40):
        case(random_of(0, index))
    if name == "gguf":
        assert loaded == {"F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}
