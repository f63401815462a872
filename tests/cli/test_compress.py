"""`millrace compress`: plan, folder, report; and its mistakes."""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.cli.compress import proof
from millrace.compile.resolve_model import BUNDLED
from millrace.errors import MachineError
from tests.cli.conftest import Millrace
from tests.fuzz.originals import write_checkpoint
from tests.support.command_line import environment


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), width=256, inner=192)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("other"), width=256, inner=128)


def test_a_dry_run_writes_nothing(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    shown = millrace("compress", source, "-o", tmp_path / "out", "--recipe", "int4-wo", "--dry-run")
    assert shown.code == 0 and not (tmp_path / "out").exists()
    for said in ("nothing was written", "7 linear layers", "lm_head left as floats", "about", "4.167 a weight"):
        assert said in shown.out, shown.out
    assert "1 matrices of 192 inputs have groups of 64" in shown.err and "1 matrices of 64 inputs" in shown.err
    told = json.loads(
        millrace("compress", source, "-o", tmp_path / "out", "--recipe", "int4-wo", "--dry-run", "--json").out
    )
    assert told["kept"] == ["lm_head"] and told["memory_bytes"] > 0 and told["bytes_after"] < told["bytes_before"]
    assert ", to measure it" in shown.out and told["measuring_memory_bytes"] > told["memory_bytes"]
    without = millrace("compress", source, "-o", "x", "--recipe", "int4-wo", "--dry-run", "--no-evaluate")
    assert without.code == 0 and "to measure it" not in without.out


def test_a_dry_run_takes_the_whole_command(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    """As it is planned: with the text to measure on, of which a mistake is said now."""
    asked = ("compress", source, "-o", tmp_path / "out", "--recipe", "int4-wo", "--dry-run", "--calibration")
    shown = millrace(*asked, BUNDLED / "calibration.txt")
    assert shown.code == 0 and "nothing was written" in shown.out, shown.err
    (tmp_path / "short.txt").write_text("a mill")
    assert millrace(*asked, tmp_path / "short.txt").code == 2
    millrace(*asked, tmp_path / "short.txt", "--no-evaluate").assert_mistake("nothing is measured")
    assert not (tmp_path / "out").exists()


def test_the_whole_way(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    """More bits lose less; the folder runs like any other checkpoint and cannot be compressed again."""
    losses = {}
    for recipe in ("int4-wo", "int8-wo"):
        out = tmp_path / recipe
        told = json.loads(millrace("compress", source, "-o", out, "--recipe", recipe, "--json").out)
        assert told["loss"]["tokens"] > 100 and told["worst"] and told["bytes_after"] < told["bytes_before"]
        assert json.loads((out / "compression.json").read_text())["loss"] == told["loss"]
        losses[recipe] = told["loss"]
    assert 0 <= losses["int8-wo"]["kl"] < losses["int4-wo"]["kl"] and losses["int8-wo"]["precision"] == "w8a16"
    shown = millrace("compress", source, "-o", tmp_path / "fp8", "--recipe", "fp8", "--no-evaluate")
    assert shown.code == 0 and "not measured: --no-evaluate" in shown.out and "found right" in shown.out
    ran = millrace("generate", tmp_path / "int4-wo", "-p", "the", "--max-tokens", "2", "--tune", "0")
    assert ran.code == 0 and "rounded again" not in ran.err
    again = millrace("compress", tmp_path / "int4-wo", "-o", tmp_path / "x", "--recipe", "fp8")
    again.assert_mistake("compressed already")


_MEASURES_FOR_LONG = """
import signal
import time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background, where it is ignored
from millrace.cli.compress import proof
from millrace.cli.main import main
def measure(source, made, read, report):
    report("reading the source", 0, 1)
    time.sleep(60)
proof.measure = measure
main()
"""


def killed_while_it_measures(source: Path, out: Path, number: int) -> int:
    """The exit code of a run that measures for long, and is sent the signal then."""
    command = [sys.executable, "-c", _MEASURES_FOR_LONG, "compress", str(source), "-o", str(out), "--recipe", "int8-wo"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment(out.parent / "cache"),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "reading the source" in line:
                process.send_signal(number)
                break
        said += process.stderr.read()
        assert number == signal.SIGKILL or f"-o {out} --measure" in said, said
        return process.wait(30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_says_how_to_go_on(source: Path, tmp_path: Path, number: int) -> None:
    assert killed_while_it_measures(source, tmp_path / "out", number) == 128 + number
    assert "loss" not in json.loads((tmp_path / "out" / "compression.json").read_text())


def test_a_measure_that_fails_leaves_a_folder_that_is_named(
    millrace: Millrace, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MachineError("the model's logits are not finite", "finite ones", "look at it")

    monkeypatch.setattr(proof, "measure", fails)
    ended = millrace("compress", source, "-o", tmp_path / "out", "--recipe", "int8-wo")
    assert ended.code and "not finite" in ended.err and "out is whole, but not all measured" in ended.err
    assert (tmp_path / "out" / "compression.json").is_file()


def test_a_run_that_was_killed_is_measured_later(millrace: Millrace, source: Path, other: Path, tmp_path: Path) -> None:
    """As a run that was not ended would have measured it."""
    out = tmp_path / "out"
    assert killed_while_it_measures(source, out, signal.SIGKILL) == -signal.SIGKILL
    record = json.loads((out / "compression.json").read_text())
    assert "loss" not in record and "int8-wo" in record["command"]
    assert "the run was ended" in (out / "compression.html").read_text()
    asked = ("compress", source, "-o", out)
    millrace(*asked, "--recipe", "int8-wo").assert_mistake("already there", "--measure")
    millrace("compress", other, "-o", out, "--measure").assert_mistake("another model", source.name)
    millrace(*asked, "--recipe", "int8-wo", "--measure").assert_mistake("--recipe and --measure are given")
    millrace(*asked, "--measure", "--no-evaluate").assert_mistake("nothing is to be measured")
    millrace("compress", source, "-o", source, "--measure").assert_mistake("compression.json", "millrace compress")
    assert json.loads((out / "compression.json").read_text()) == record
    shown = millrace(*asked, "--measure")
    assert shown.code == 0 and "KL" in shown.out, shown.err
    whole = json.loads(millrace("compress", source, "-o", tmp_path / "whole", "--recipe", "int8-wo", "--json").out)
    measured = json.loads((out / "compression.json").read_text())
    assert measured.pop("commands") == {"loss": f"millrace compress {source} --output {out} --measure"}
    assert measured == {**record, "loss": whole["loss"]}


def test_a_loss_says_of_which_text_it_is(millrace: Millrace, source: Path, text: Path, tmp_path: Path) -> None:
    """Measured again on another one: the new loss, with its own text and command; how it was made stays."""
    out, bundled = tmp_path / "out", (BUNDLED / "calibration.txt").read_bytes()
    first = json.loads(millrace("compress", source, "-o", out, "--recipe", "int8-wo", "--json").out)["loss"]
    assert (first["text"], first["digest"]) == ("bundled", hashlib.blake2b(bundled, digest_size=16).hexdigest())
    made = json.loads((out / "compression.json").read_text())
    assert made["commands"] == {"loss": made["command"]}
    page = (out / "compression.html").read_text()
    assert f"the bundled text ({first['digest'][:12]})" in page and "measured by" not in page
    assert millrace("compress", source, "-o", out, "--measure", "--calibration", text).code == 0
    again = json.loads((out / "compression.json").read_text())
    digest = hashlib.blake2b(text.read_bytes(), digest_size=16).hexdigest()
    assert (again["loss"]["text"], again["loss"]["digest"]) == ("own", digest) and again["command"] == made["command"]
    command = f"millrace compress {source} --output {out} --measure --calibration {text}"
    assert again["commands"] == {"loss": command} and again["loss"]["kl"] != first["kl"]
    page = (out / "compression.html").read_text()
    assert f"a text of its own ({digest[:12]})" in page and "loss measured by" in page and command in page


EASY, HARD = "The wheel of the mill turned slowly in the cold river. ", "@#$%^&*"


def test_a_text_that_the_source_cannot_tell_is_said(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    """Of random weights, which tell no text; a mark that some programs write before one changes nothing of it."""
    vocab_size, losses = json.loads((source / "config.json").read_text())["vocab_size"], {}
    for name, words, encoding in (("easy", EASY, "utf-8"), ("marked", EASY, "utf-8-sig"), ("hard", HARD, "utf-8")):
        (text := tmp_path / f"{name}.txt").write_text(words * 60, encoding=encoding)
        done = millrace(
            "compress", source, "-o", tmp_path / name, "--recipe", "int8-wo", "--json", "--calibration", text
        )
        found = json.loads(done.out)["loss"]
        assert (found["source_perplexity"] > vocab_size) == (name == "hard") == ("worse than guessing" in done.err)
        losses[name] = {key: found[key] for key in ("kl", "tokens", "source_perplexity", "digest")}
    assert losses["easy"] == losses["marked"]


def test_mistakes(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    (tmp_path / "newer.json").write_text('{"version": 9}')
    (tmp_path / "short.txt").write_text("a mill")
    asked = ("compress", source, "-o", tmp_path / "out")
    millrace(*asked, "--recipe", "int4-w").assert_mistake('did you mean "int4-wo"')
    millrace(*asked, "--recipe", tmp_path / "newer.json").assert_mistake("version 9", "update Millrace")
    millrace("compress", source, "-o", source, "--recipe", "fp8").assert_mistake("already there")
    inside = ("compress", source, "-o", tmp_path / "short.txt" / "out")
    millrace(*inside, "--recipe", "fp8").assert_mistake("short.txt, which is a file", "another with -o")
    millrace(*asked, "--recipe", "fp8", "--no-evaluate", "--calibration", "x").assert_mistake("nothing is measured")
    millrace(*asked, "--recipe", "fp8", "--calibration", tmp_path / "none.txt").assert_mistake("none.txt")
    short = millrace(*asked, "--recipe", "fp8", "--calibration", tmp_path / "short.txt")
    short.assert_mistake("short.txt")
    assert not (tmp_path / "out").exists(), "a text that is too short is said before anything is written"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the bundled one."""
    path, whole = tmp_path_factory.mktemp("text") / "half.txt", (BUNDLED / "calibration.txt").read_text()
    path.write_text(whole[: len(whole) // 2])
    return path


def test_with_statistics(millrace: Millrace, source: Path, text: Path, tmp_path: Path) -> None:
    """Collected once and kept, or beside the output and gone: the same folder."""
    given = ("--samples-from", text, "--samples", "4", "--no-evaluate")
    asked, out = ("compress", source, "--recipe", "int4-gptq"), tmp_path / "out"
    shown = millrace(*asked, "-o", out / "a", *given)
    assert shown.code == 0 and "found right" in shown.out, shown.err
    assert [p.name for p in out.iterdir()] == ["a"], "what was collected is gone"
    kept = tmp_path / "kept"
    told = json.loads(millrace(*asked, "-o", out / "b", *given, "--statistics", kept, "--json").out)
    again = millrace(*asked, "-o", out / "c", "--statistics", kept, "--no-evaluate")
    assert again.code == 0 and told["layers"] == 7, again.err
    files = [(out / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] == files[2]
    records = [json.loads((out / name / "compression.json").read_text()) for name in "abc"]
    for record, name in zip(records, "abc", strict=True):
        assert record.pop("command").startswith(f"millrace compress {source} --output {out / name} --recipe int4-gptq")
        assert record.pop("seconds") > 0
    assert records[0] == records[1] == records[2] and records[0]["statistics"]["tokens"] == 4 * 256
    other = millrace("compress", "tiny", "--recipe", "int4-awq", "-o", out / "d", "--statistics", kept)
    other.assert_mistake("of another model")
    other = millrace(*asked, "-o", out / "d", *given[:2], "--samples", "5", "--statistics", kept)
    other.assert_mistake("of another text")
    assert not (out / "d").exists()


def test_a_text_is_not_what_statistics_are_of(millrace: Millrace, source: Path, text: Path, tmp_path: Path) -> None:
    """Whatever its name is, and however long ago they were collected: by folder, by record, by content."""
    copy, kept, out = tmp_path / "copy.txt", tmp_path / "kept", tmp_path / "out"
    copy.write_bytes(text.read_bytes())
    asked = ("compress", source, "-o", out, "--recipe", "int8-sq")
    given = ("--samples-from", text, "--samples", "4", "--statistics", kept)
    millrace(*asked, *given, "--calibration", copy).assert_mistake("copy.txt is the text that statistics are of")
    assert not kept.exists() and not out.exists(), "said before anything is collected"
    assert millrace(*asked, *given, "--no-evaluate").code == 0
    millrace(*asked[:3], tmp_path / "b", *asked[4:], "--statistics", kept, "--calibration", copy).assert_mistake(
        "copy.txt is"
    )
    bounded = (
        "compress",
        source,
        "-o",
        tmp_path / "b",
        "--max-loss",
        "9%",
        "--statistics",
        kept,
        "--calibration",
        copy,
    )
    millrace(*bounded).assert_mistake("copy.txt is the text")
    advised = ("compress", source, "-o", tmp_path / "b", "--advise", "--statistics", kept, "--calibration", copy)
    millrace(*advised).assert_mistake("copy.txt is the text")
    millrace("compress", source, "-o", out, "--measure", "--calibration", copy).assert_mistake("copy.txt is the text")
    assert not (tmp_path / "b").exists() and "kl" not in (out / "compression.json").read_text()
    copy.write_text(text.read_text()[::2])
    assert millrace("compress", source, "-o", out, "--measure", "--calibration", copy).code == 0


def test_a_dry_run_says_what_statistics_need(millrace: Millrace, source: Path, tmp_path: Path) -> None:
    asked = ("compress", source, "-o", tmp_path / "out", "--recipe", "int8-sq", "--dry-run", "--samples", "8")
    millrace(*asked).assert_mistake("--samples is given without a text")
    shown = millrace(*asked[:-2])
    assert shown.code == 0 and "of 65,536 tokens: about" in shown.out, shown.err
    told = json.loads(millrace(*asked, "--samples-from", "later.txt", "--json").out)
    assert told["statistics"]["carried_bytes"] == 8 * 256 * 8 * 512, "float32 of 256, twice, of 8 samples"
    assert "MiB more meanwhile" in shown.out
    assert told["statistics"]["disk_bytes"] == 4 * sum(K * K + 2 * K for K in (256, 64, 256, 192))


def test_mistakes_with_statistics(millrace: Millrace, source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "out"
    asked = ("compress", source, "-o", out, "--recipe")
    (tmp_path / "short.txt").write_text("a mill")
    (tmp_path / "empty.txt").write_text(" ")
    millrace(*asked, "int4-gptq").assert_mistake("int4-gptq needs a text", "--samples-from")
    millrace(*asked, "fp8", "--samples-from", text).assert_mistake("fp8 needs no statistics")
    millrace(*asked, "fp8", "--statistics", tmp_path / "s").assert_mistake("fp8 needs no statistics")
    millrace(*asked, "int4-awq", "--statistics", tmp_path / "s").assert_mistake("no statistics yet", "--samples-from")
    millrace(*asked, "int4-awq", "--samples-from", text, "--calibration", text).assert_mistake("are one text")
    millrace(*asked, "int4-awq", "--samples-from", tmp_path / "short.txt").assert_mistake("text for statistics has")
    millrace(*asked, "int4-awq", "--samples-from", tmp_path / "empty.txt").assert_mistake("is empty")
    millrace(*asked, "int4-awq", "--samples-from", tmp_path / "none.txt").assert_mistake("none.txt")
    for inside in (out, out / "s", out.parent / "." / "out"):
        same = (*asked, "int4-awq", "--samples-from", text, "--samples", "1", "--statistics", inside)
        millrace(*same).assert_mistake("the folder of -o", "another folder for statistics")
    long = (*asked, "int4-awq", "--samples-from", text, "--samples", "1", "--statistics", text)
    millrace(*long).assert_mistake("cannot keep statistics", "File exists", "name another folder")
    assert not out.parent.exists() and not (tmp_path / "s").exists()


def questions(folder: Path) -> Path:
    """Two subjects in MMLU's form."""
    for name, n in (("sums", 5), ("words", 3)):
        for split, m in (("dev", 5), ("test", n)):
            (folder / split).mkdir(parents=True, exist_ok=True)
            rows = [f"What is {i}?,one,two,three,{i},{i % 4}" for i in range(m)]
            (folder / split / f"{name}_{split}.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_speed_and_flips(millrace: Millrace, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder that is there: in its record and on its page; the loss that was measured stays."""
    monkeypatch.setattr(proof, "TUNE_S", 0)
    out, mmlu = tmp_path / "out", questions(tmp_path / "mmlu")
    made = json.loads(millrace("compress", source, "-o", out, "--recipe", "int8-wo", "--json").out)
    asked = ("compress", source, "-o", out, "--measure", "--no-evaluate")
    told = json.loads(millrace(*asked, "--measure-speed", "--mmlu", mmlu, "--questions", "3", "--json").out)
    record = json.loads((out / "compression.json").read_text())
    assert record["loss"] == made["loss"] and told.keys() == {"folder", "speed", "mmlu"}
    assert {key: record[key] for key in ("speed", "mmlu")} == {key: told[key] for key in ("speed", "mmlu")}
    works = [pace["work"] for pace in told["speed"]["paces"]]
    assert works == ["prefill of 256", "decode, alone", "decode, 4 at once", "decode, 16 at once"]
    for pace in told["speed"]["paces"]:
        for rate in (pace["source"], pace["made"]):
            assert 0 < rate["low"] <= rate["median"] <= rate["high"]
    assert told["speed"]["source_precision"] != told["speed"]["made_precision"]
    flips = told["mmlu"]
    assert record["commands"]["loss"] == record["command"] and "--measure-speed" in record["commands"]["speed"]
    assert len(flips["digest"]) == 32
    assert flips["questions"] == 6 and flips["task"] == "mmlu, lm-eval, 5 shots"
    assert flips["made_right"] - flips["source_right"] == flips["became_right"] - flips["became_wrong"]
    against = millrace("eval", out, "--data", mmlu, "--limit", "3", "--against", source, "--json", "--tune", "0")
    told_there = json.loads(against.out)
    assert told_there["right"] == flips["made_right"]
    beside = told_there["against"]
    assert [beside["gained"], beside["lost"]] == [flips["became_right"], flips["became_wrong"]]
    page = (out / "compression.html").read_text()
    assert "decode, 16 at once" in page and f"6 questions ({flips['digest'][:12]})" in page
    shown = millrace(*asked, "--mmlu", mmlu)
    assert shown.code == 0 and "of 8 questions" in shown.out, shown.err
    millrace(*asked, "--questions", "3").assert_mistake("--questions is given without")
    millrace(*asked, "--mmlu", tmp_path / "none").assert_mistake("none")
