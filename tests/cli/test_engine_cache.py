"""`millrace list`, `rm` and `pull`."""

import json
from pathlib import Path

from millrace import LLM, SamplingParams
from millrace.kernels.library import usable_isas
from tests.cli.conftest import Millrace

ASK = ("-p", "Once", "--max-tokens", "1", "--tune", "0", "--no-evaluate")


def test_list_and_rm(millrace: Millrace) -> None:
    assert json.loads(millrace("list", "--json").out) == []
    assert "no engines" in millrace("list").err
    millrace("generate", "tiny", *ASK)
    millrace("generate", "tiny", *ASK, "--precision", "w8a8")
    millrace("generate", "tiny", *ASK)  # not built a third time
    entries = json.loads(millrace("list", "--json").out)
    assert len(entries) == 2 and all(e["bytes"] > 1 << 20 for e in entries)
    assert all(e["name"] in millrace("list").out for e in entries)
    names = [e["name"] for e in entries]
    assert [e["name"] for e in json.loads(millrace("rm", *names, "--json").out)] == names
    assert json.loads(millrace("list", "--json").out) == []


def test_rm_of_an_unknown_name_removes_nothing(millrace: Millrace) -> None:
    millrace("rm", "tiny-123").assert_mistake('no engine "tiny-123"', "the cache is empty")
    millrace("generate", "tiny", *ASK)
    (entry,) = json.loads(millrace("list", "--json").out)
    near = entry["name"][:-1] + "x"
    millrace("rm", entry["name"], near).assert_mistake(f'no engine "{near}"', f'did you mean "{entry["name"]}"?')
    assert len(json.loads(millrace("list", "--json").out)) == 1
    assert "removed" in millrace("rm", entry["name"]).err


def test_an_engine_that_runs_is_not_removed(millrace: Millrace) -> None:
    millrace("generate", "tiny", *ASK, "--precision", "w8a8")
    with LLM("tiny", tune=0) as llm:
        entries = json.loads(millrace("list", "--json").out)
        used, free = (e["name"] for e in entries)
        millrace("rm", free, used).assert_mistake(f'the engine "{used}" is in use', "end the server or program")
        assert json.loads(millrace("list", "--json").out) == entries, "none of them"
        assert len(llm.generate("word " * 500, SamplingParams(max_tokens=1))) == 1
    assert millrace("rm", free, used).code == 0
    assert json.loads(millrace("list", "--json").out) == []


def test_rm_takes_names_only(millrace: Millrace) -> None:
    millrace("generate", "tiny", *ASK)
    for name in ("../engines", "..", "/", ".", ""):
        millrace("rm", name).assert_mistake("no engine")
    assert len(json.loads(millrace("list", "--json").out)) == 1


def test_pull_of_what_is_here(millrace: Millrace) -> None:
    told = json.loads(millrace("pull", "tiny", "--json").out)
    assert told["name"] == "tiny" and told["bytes"] > 1 << 20
    assert "tiny: " in millrace("pull", "tiny").err


def test_the_list_says_which_model_in_which_precision(millrace: Millrace) -> None:
    for precision in ("w8a8", "bf16"):
        assert (
            millrace(
                "generate",
                "tiny",
                "Once",
                "--max-tokens",
                "1",
                "--tune",
                "0",
                "--no-evaluate",
                "--precision",
                precision,
            ).code
            == 0
        )
    listed = json.loads(millrace("list", "--json").out)
    assert [(e["model"], e["precision"]) for e in listed] == [("tiny", "bf16"), ("tiny", "w8a8")]
    shown = millrace("list").out.splitlines()
    assert shown[0].split() == ["model", "precision", "size", "used", "engine"]
    assert shown[1].split()[:2] == ["tiny", "bf16"] and listed[0]["name"] in shown[1] and "ago" in shown[1]
    (Path(listed[0]["folder"]) / "manifest.json").write_text("{}")
    assert "unreadable" in millrace("list").out
    removed = json.loads(millrace("rm", "tiny", "--json").out)
    assert {e["name"] for e in removed} == {e["name"] for e in listed} and json.loads(
        millrace("list", "--json").out
    ) == []


def test_engines_of_one_precision_are_told_apart(millrace: Millrace) -> None:
    """By what they differ in, and nothing else; `rm` says the same of what it removed."""
    ways = (
        ["--max-context", "512"],
        ["--max-batch", "4", "--kv-cache-dtype", "int8", "--head", "w4a8"],
        ["--head", "bf16", "--bf16-sums", "pairs"],
    )
    names = []
    for way in ways:
        assert millrace("generate", "tiny", *ASK, "--precision", "w4a8", "--bf16-sums", "pairs", *way).code == 0
        names.append(json.loads(millrace("list", "--json").out)[0]["name"])
    millrace("generate", "tiny", *ASK, "--precision", "bf16")
    listed = {e["name"]: e for e in json.loads(millrace("list", "--json").out)}
    assert [listed[n]["context"] for n in names] == [512, 2048, 2048]
    assert [listed[n]["batch"] for n in names] == [16, 4, 16]
    assert [listed[n]["kv"] for n in names] == ["bf16", "int8", "bf16"]
    heads = [listed[n]["head"] for n in names]
    assert heads == ["w8a8", "w4a8 rescored", "bf16"]
    shown = {line.split()[-1]: " ".join(line.split()) for line in millrace("list").out.splitlines()}
    assert "differs in" in shown["engine"]
    assert "context 512, batch 16, kv bf16, head w8a8 tiny-" in shown[names[0]]
    assert "context 2048, batch 4, kv int8" in shown[names[1]] and "head bf16 tiny-" in shown[names[2]]
    alone = next(n for n, e in listed.items() if e["precision"] == "bf16")
    assert shown[alone].endswith(f"ago {alone}"), "there is no other of its precision"
    removed = millrace("rm", names[0]).err
    assert f"removed {names[0]} (w4a8, context 512, batch 16" in removed
    millrace("rm", names[1])
    assert "differs in" not in millrace("list").out, "one engine a precision is told by it"


def test_a_misspelt_model_is_suggested(millrace: Millrace) -> None:
    for command in (["serve", "tinny"], ["generate", "tinny", "Once"], ["chat", "Tiny"]):
        millrace(*command).assert_mistake("there is no model", 'did you mean "tiny"?')


def test_one_engine_is_built_once_however_it_is_asked_for(millrace: Millrace) -> None:
    """Defaults and what they stand for are the same engine; how long to time kernels makes no other."""
    plain = ("-p", "Once", "--max-tokens", "1")
    same: list[list[str]] = [
        ["--tune", "0"],
        [],
        ["--tune", "1"],
        ["--precision", "bf16"],
        ["--precision", "bf16", "--head", "bf16", "--kv-cache-dtype", "bf16"],
        ["--group", "64"],  # of bfloat16 there are no groups
        ["--max-context", "2048", "--max-batch", "16"],
    ]
    for way in same:
        assert millrace("generate", "tiny", *plain, *way).code == 0
        assert len(json.loads(millrace("list", "--json").out)) == 1, way
    assert (
        "note: this engine is there already, and is not timed again: millrace tune /"
        in millrace("generate", "tiny", *plain, "--tune", "9").err
    )
    other_sums = "pairs" if "amx" in usable_isas() else "tiles"
    others = [
        ["--bf16-sums", other_sums],
        ["--kv-cache-dtype", "fp32"],
        ["--head", "w8a8"],
        ["--max-batch", "4"],
        ["--precision", "fp32"],
    ]
    for n, way in enumerate(others, 2):
        assert millrace("generate", "tiny", *plain, "--tune", "0", *way).code == 0
        assert len(json.loads(millrace("list", "--json").out)) == n, way
    assert millrace("generate", "tiny", *ASK, "--precision", "w4a8").code == 0
    assert millrace("generate", "tiny", *ASK, "--precision", "w4a8", "--head", "w4a8").code == 0
    assert len(json.loads(millrace("list", "--json").out)) == len(others) + 3, "the second head has four bits"
