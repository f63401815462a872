"""Which method to take, from figures that are given; and the folder that they lie in."""

from pathlib import Path

import msgspec
import pytest

from millrace.compress.measure.accuracy import Loss
from millrace.compress.measure.speed import Speeds, StepRate, TimedRun
from millrace.compress.recipe import PRESETS, parsed
from millrace.compress.report.method_comparison import (
    PAGE,
    ComparisonInputs,
    MethodRow,
    advice,
    cells,
    open_folder,
    precisions_of,
    read_row,
    write_page,
    write_row,
)
from millrace.errors import ConfigError

ABOUT = ComparisonInputs(model="m", source="mill", text="t", batch=16, machine="<cpu>", threads=2, isa="avx2",
              bytes_before=1000)  # fmt: skip
WORKS = ("decode, alone", "decode, 16 at once", "prefill of 512")


def row(name: str, kl: float, nbytes: int, *rates: float, spread: float = 0.01) -> MethodRow:
    """rates: of each work, where the source has 100; spread: of rounds around the median"""
    source = StepRate(100, 99, 101)
    paces = [
        TimedRun(w, source, StepRate(r, r * (1 - spread), r * (1 + spread))) for w, r in zip(WORKS, rates, strict=True)
    ]
    speed = Speeds(machine="c", threads=2, isa="avx2", source_precision="bf16", made_precision="x", paces=paces)
    loss = Loss(kl, 20 * (1 + kl), 20, 1 - 4 * kl, 1000, "w8a16")
    return MethodRow(name=name, bits_per_weight=8, bytes=nbytes, seconds=3, loss=loss, speed=speed)


def words(*rows: MethodRow) -> dict[str, str]:
    return {each.target: each.words for each in advice(rows, ABOUT)}


def test_the_best_of_those_that_lose_little_and_what_more_loss_buys() -> None:
    rows = (
        row("eight", 0.004, 520, 180, 90, 80),
        row("four", 0.05, 270, 300, 40, 110),
        row("nine", 0.008, 530, 120, 95, 90),
    )
    found = words(*rows)
    assert found["one answer at a time"] == (
        "eight: 1.80 times the source's speed (180 tokens/s), KL 0.004. four has 3.00 times the source's speed "
        "(300 tokens/s), but 16 answers at a time at 0.40 times, for KL 0.05: of its likeliest tokens 20% are others"
    )
    assert found["16 answers at a time"] == (
        "leave it as it is: nine, the best within KL 0.01, has 0.95 times the source's speed (95 tokens/s)"
    ), "nothing is faster, and what loses more is slower still"
    assert found["long prompts"].startswith("leave it as it is: nine,") and "four has 1.10" in found["long prompts"]
    assert found["memory"].startswith("eight: 52% of the source's bytes, KL 0.004. four has 27% of the source's bytes")


def test_a_method_that_slows_prompts_is_not_advised_without_saying_so() -> None:
    """INT4 weights with 16-bit activations decode faster and read prompts at a fraction of the speed."""
    found = words(row("int4", 0.009, 270, 250, 60, 16), row("eight", 0.004, 520, 180, 150, 80))
    assert found["one answer at a time"] == (
        "int4: 2.50 times the source's speed (250 tokens/s), but long prompts at 0.16 times, KL 0.009"
    )
    assert found["16 answers at a time"].startswith("eight: 1.50 times the source's speed (150 tokens/s), KL")


def as_w4a8(own: MethodRow, kl: float, *rates: float) -> MethodRow:
    return msgspec.structs.replace(row(own.name, kl, own.bytes, *rates), precision="w4a8")


def test_four_bits_are_offered_as_w4a8_within_the_bound() -> None:
    four, eight = row("four", 0.117, 270, 250, 60, 16), row("eight", 0.004, 520, 180, 150, 80)
    offered = as_w4a8(four, 0.121, 240, 170, 190)
    found = words(eight, four, offered)
    assert found["memory"] == (
        "eight: 52% of the source's bytes, KL 0.004. four has 27% of the source's bytes, but long prompts at 0.16 "
        "times, for KL 0.117: of its likeliest tokens 47% are others. four as w4a8 has 16 answers at a time at 1.70 "
        "rather than 0.60 times and long prompts at 1.90 rather than 0.16 times, KL 0.121 rather than 0.117"
    )
    assert "four as w4a8 has 1.90 times the source's speed (190 tokens/s), for KL 0.121" in found["long prompts"]
    memory = next(each for each in advice([eight, four, offered], ABOUT) if each.target == "memory")
    assert memory.rows == (eight, four, offered)
    dear = words(eight, four, as_w4a8(four, 0.128, 240, 170, 190))["memory"]
    assert dear.endswith("for KL 0.117: of its likeliest tokens 47% are others"), "0.011 besides is beyond the bound"
    slow = words(eight, four, as_w4a8(four, 0.121, 240, 60, 16))["memory"]
    assert "w4a8" not in slow, "it is ahead in nothing"


def test_w4a8_beyond_the_bound_is_not_offered_where_its_own_precision_is_within() -> None:
    four = row("four", 0.009, 270, 250, 60, 16)
    within, beyond = as_w4a8(four, 0.0099, 240, 170, 190), as_w4a8(four, 0.012, 240, 170, 190)
    found = words(four, within)
    assert found["long prompts"] == "four as w4a8: 1.90 times the source's speed (190 tokens/s), KL 0.0099"
    assert found["memory"].startswith("four: 27% of the source's bytes, but long prompts at 0.16 times, KL 0.009. four")
    assert "w4a8" not in words(four, beyond)["memory"]
    assert "leave it as it is: four," in words(four, beyond)["long prompts"]


def test_which_presets_are_measured_as_w4a8() -> None:
    found = {name for name, recipe in PRESETS.items() if precisions_of(recipe) == ("", "w4a8")}
    assert found == {"int4-wo", "int4-wo-mse", "int4-gptq", "int4-gptq-clip", "int4-awq", "w4afp8-awq"}
    meant = parsed({"version": 1, "bits": 4, "activations": 8}, "x")
    assert precisions_of(meant) == ("",), "it runs as W4A8 already"


def test_within_the_noise_what_loses_least_is_taken() -> None:
    fast, near = (
        row("fast", 0.009, 500, 200, 200, 200, spread=0.05),
        row("near", 0.001, 520, 195, 150, 195, spread=0.02),
    )
    found = words(fast, near)
    assert found["one answer at a time"].startswith("near:") and found["16 answers at a time"].startswith("fast:")
    assert found["memory"].startswith("fast:")
    assert words(fast, row("near", 0.001, 504, 195, 150, 195))["memory"].startswith("near:"), "as small, to a hundredth"
    larger = words(row("a", 0.004, 1200, 90, 90, 90), row("b", 0.2, 1100, 95, 95, 95))
    assert all(said.startswith("leave it as it is: a") and "b has" not in said for said in larger.values())


def test_a_neighbour_beside_the_source_makes_no_method_faster() -> None:
    """As it was for the 1.1B shape: the source had 16 tokens/s beside one method in some rounds, 24 beside the other.
    What is ahead by medians is so only where its slowest round is ahead of what the source may have had."""
    near, far = row("near", 0.001, 500, 170, 170, 170), row("far", 0.2, 300, 190, 190, 190)
    assert "far has 1.90 times" in words(near, far)["one answer at a time"]
    assert far.speed is not None
    unsure = [msgspec.structs.replace(pace, source=StepRate(100, 99, 115)) for pace in far.speed.paces]
    unsure_row = msgspec.structs.replace(far, speed=msgspec.structs.replace(far.speed, paces=unsure))
    assert (
        words(near, unsure_row)["one answer at a time"]
        == "near: 1.70 times the source's speed (170 tokens/s), KL 0.001"
    )


def test_where_all_lose_much_or_nothing_was_measured() -> None:
    found = words(row("four", 0.3, 270, 300, 300, 300), row("five", 0.2, 300, 200, 300, 300))
    assert found["memory"] == "none keeps within KL 0.01: five loses least (KL 0.2), 30% of the source's bytes"
    assert words(MethodRow(name="gptq", refused="a layer has 20 inputs")) == {}


def test_a_folder_is_of_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "advice"
    open_folder(folder, ABOUT)
    assert read_row(folder, "eight", "") is None
    eight, none = row("eight", 0.004, 520, 180, 90, 80), MethodRow(name="gptq", refused="<20 inputs>")
    for one in (eight, none):
        write_row(folder, one)
    open_folder(folder, ABOUT)
    assert read_row(folder, "eight", "") == eight and read_row(folder, "gptq", "") == none
    with pytest.raises(ConfigError, match="has figures of batch 16") as error:
        open_folder(folder, msgspec.structs.replace(ABOUT, batch=8))
    assert "another folder" in error.value.fix
    write_row(folder, msgspec.structs.replace(eight, name="sq", statistics="s"))
    assert read_row(folder, "sq", "s") and read_row(folder, "eight", "s") == eight, "which needed no statistics"
    with pytest.raises(ConfigError, match=r"sq.json has figures of another calibration text"):
        read_row(folder, "sq", "other")
    (folder / "eight.json").write_bytes((folder / "eight.json").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"eight.json is damaged"):
        read_row(folder, "eight", "")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(ConfigError, match="has other files"):
        open_folder(tmp_path / "other", ABOUT)
    with pytest.raises(ConfigError, match="cannot write"):
        open_folder(tmp_path / "other" / "x", ABOUT)
    table = cells([eight, none], ABOUT, str)
    assert table[0] == ["as it is", "", "", "", "", "1000", "100", "100", "100", ""]
    assert table[1] == ["eight", "0.004", "+0.4%", "98.4%", "8.00", "520", "180 (1.80)", "90 (0.90)", "80 (0.80)", "3"]
    write_page(folder, [eight, none], ABOUT, str)
    page = (folder / PAGE).read_text()
    assert "&lt;cpu&gt;" in page and "&lt;20 inputs&gt;" in page and "<script" not in page and "decode 16" in page
