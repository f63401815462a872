"""The nights: what is stale is run, a red part and an absent one fail the check, a known one does not."""

import datetime
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.drawn import FAST, NIGHT, TIMES, examples, within
from tools.nightly import __main__ as nightly
from tools.nightly.packages import ROOT, environment
from tools.nightly.parts import PARTS, Part

NOW = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
OK = Part("ok", "exits with 0", ("{python}", "-c", "print('text'); print('{{\"cases\": {seed}}}')"), cases=10)
BAD = Part("bad", "exits with 3", ("{python}", "-c", "print('why'); raise SystemExit(3)"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nightly, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(nightly, "KNOWN", tmp_path / "known.json")
    monkeypatch.setattr(nightly, "PARTS", (OK, BAD))
    monkeypatch.setattr(nightly, "_commit", lambda: "abc1234")
    (tmp_path / "known.json").write_text("{}")
    return tmp_path


def known(here: Path, **reasons: str) -> None:
    (here / "known.json").write_text(json.dumps(reasons))


def test_a_part_leaves_its_figures_and_goes_on_with_new_seeds(here: Path) -> None:
    assert [nightly.run(OK)["figures"] for _ in range(3)] == [{"cases": 0}, {"cases": 1}, {"cases": 2}]
    result = json.loads((here / "results" / "ok.json").read_text())
    assert result["green"] and result["next_seed"] == 3 and result["cases_so_far"] == 30 and "tail" not in result


def test_a_red_part_says_why_and_is_run_again_as_it_was() -> None:
    result = nightly.run(BAD)
    assert not result["green"] and result["exit_code"] == 3 and result["tail"] == ["why"]
    nightly.run(OK)
    unlucky = replace(OK, command=("{python}", "-c", "raise SystemExit({seed})"))
    assert [nightly.run(unlucky)["next_seed"] for _ in range(2)] == [1, 1], "seed 1 fails until it is fixed"


def test_a_part_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "MINUTES", 1 / 120)
    result = nightly.run(Part("endless", "sleeps", (sys.executable, "-c", "import time; time.sleep(60)")))
    assert not result["green"] and result["exit_code"] is None and result["seconds"] < 30


def test_the_check_fails_for_what_is_absent_or_red(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nightly.run(OK)
    assert nightly.status(NOW) == 1 and "bad is absent" in capsys.readouterr().out
    known(here, bad="nobody has run it")
    assert nightly.status(NOW) == 1 and "bad is absent" in capsys.readouterr().out, "no reason makes up for a result"
    known(here)
    nightly.run(BAD)
    assert nightly.status(NOW) == 1 and "bad is red" in capsys.readouterr().out
    known(here, bad="waits for a fix")
    assert nightly.status(NOW) == 0 and "red (known: waits for a fix)" in capsys.readouterr().out
    known(here, bad="waits for a fix", ok="was red once")
    assert nightly.status(NOW) == 1 and "ok is green: take it out" in capsys.readouterr().out
    known(here, bad="waits for a fix", gone="of a part that is no more")
    assert nightly.status(NOW) == 1 and "gone: no such part" in capsys.readouterr().out


def test_a_release_fails_for_what_is_stale_and_for_instruction_sets_that_nobody_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = replace(OK, name="kernels", files=("native",))
    monkeypatch.setattr(nightly, "PARTS", (OK, kernels))
    monkeypatch.setattr(nightly, "usable_isas", lambda: ["avx2", "scalar"])
    monkeypatch.setattr(nightly, "is_stale", lambda part, result: False)
    nightly.run(OK)
    nightly.run(kernels)
    assert nightly.status(NOW) == 0
    assert "ran on no machine with: amx, avx512" in capsys.readouterr().out
    assert nightly.status(NOW, release=True) == 1
    said = capsys.readouterr().out
    assert "no result covers amx" in said and "no result covers avx2" not in said and "is stale" not in said
    monkeypatch.setattr(nightly, "is_stale", lambda part, result: part is kernels)
    assert nightly.status(NOW) == 0 and "stale: kernels\n" in capsys.readouterr().out
    assert nightly.status(NOW, release=True) == 1
    said = capsys.readouterr().out
    assert "kernels is stale: run `make nightly PARTS=kernels`" in said and "no result covers avx2" in said


def test_emulation_is_reported_and_does_not_count_as_hardware(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulating = replace(OK, name="emulating", files=("native",), emulates=("amx",))
    monkeypatch.setattr(nightly, "PARTS", (emulating,))
    monkeypatch.setattr(nightly, "usable_isas", lambda: ["avx512", "avx2", "scalar"])
    monkeypatch.setattr(nightly, "is_stale", lambda part, result: False)
    assert nightly.run(emulating)["emulated"] == ["amx"]
    assert nightly.status(NOW) == 0 and "ran on no machine with: amx (emulated only)\n" in capsys.readouterr().out
    assert nightly.status(NOW, release=True) == 1
    assert "no result covers amx (emulated only): run a part" in capsys.readouterr().out
    monkeypatch.setattr(nightly, "usable_isas", lambda: ["amx", "avx512", "avx2", "scalar"])
    nightly.run(emulating)
    assert nightly.status(NOW, release=True) == 0 and "emulated" not in capsys.readouterr().out
    monkeypatch.setattr(nightly, "usable_isas", lambda: ["avx512", "avx2", "scalar"])
    nightly.run(emulating)
    monkeypatch.setattr(nightly, "is_stale", lambda part, result: True)
    nightly.status(NOW)
    assert "emulated" not in capsys.readouterr().out, "nor does a stale result"


def test_every_part_covers_files_of_the_product() -> None:
    for part in PARTS:
        assert part.files and all((ROOT / file).exists() for file in part.files), part.name
        assert any(not file.startswith("tests") for file in part.files), part.name


@pytest.mark.parametrize("reasons", [{}, {"bad": "waits for a fix"}])
def test_a_result_of_a_changed_tree_is_none(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str], reasons: dict[str, str]
) -> None:
    part = BAD if reasons else OK
    monkeypatch.setattr(nightly, "PARTS", (part,))
    known(here, **reasons)
    nightly.run(part)
    assert nightly.status(NOW) == 0
    capsys.readouterr()
    monkeypatch.setattr(nightly, "_commit", lambda: "abc1234+")
    nightly.run(part)
    assert nightly.status(NOW) == 1 and f"{part.name} ran in a tree with changes" in capsys.readouterr().out


def git(folder: Path, *words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_result_is_stale_where_the_parts_own_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is said, and passes: every edit of a test would ask for a night otherwise."""
    repository = tmp_path / "repository"
    (repository / "mine").mkdir(parents=True)
    git(repository, "init", "-q")

    def commit(path: str) -> str:
        (repository / path).write_text(path + str(len(list(repository.rglob("*")))))
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", path)
        return git(repository, "rev-parse", "--short", "HEAD")

    part = replace(OK, files=("mine",))
    monkeypatch.setattr(nightly, "ROOT", repository)
    monkeypatch.setattr(nightly, "PARTS", (part,))
    first = commit("mine/a")
    monkeypatch.setattr(nightly, "_commit", lambda: first)
    nightly.run(part)

    def says_stale() -> bool:
        assert nightly.status(NOW) == 0
        return "stale" in capsys.readouterr().out

    capsys.readouterr()
    assert not says_stale()
    commit("other")
    assert not says_stale(), "files of others"
    commit("mine/b")
    assert says_stale()
    monkeypatch.setattr(nightly, "_commit", lambda: "0123abc")
    nightly.run(part)
    capsys.readouterr()
    assert not says_stale(), "nothing is known of a commit that is not here"


def test_what_is_compared_with_lm_eval_is_ours_as_it_is_now() -> None:
    """A night of it is stale where what answers has changed, not its test alone."""
    (part,) = (one for one in PARTS if one.name == "mmlu")
    assert "src/millrace/evaluate" in part.files and all((ROOT / file).exists() for file in part.files)


@pytest.mark.parametrize(
    ("tail", "figures"),
    [
        (["....", "2 failed, 31 passed, 4 skipped, 7 deselected in 8.15s"], {"failed": 2, "passed": 31, "skipped": 4}),
        (["===== 1 passed in 0.02s =====", ""], {"passed": 1}),
        (["31 passed, 1 error in 71.15s (0:01:11)"], {"passed": 31, "error": 1}),
        (["3 passed in the morning"], {}),
        (['{"cases": 3}', "3 of 4 in 2 s"], {"cases": 3}),
        (["....", '{"chats": {"same": 3}}', "...", "1 passed in 0.02s"], {"chats": {"same": 3}, "passed": 1}),
        (["{broken"], {}),
        ([], {}),
    ],
)
def test_figures_are_what_lines_tell(tail: list[str], figures: dict[str, int]) -> None:
    assert nightly._figures(tail) == figures


def test_a_part_of_pytest_tells_how_many_passed(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no')\ndef test_c(): pass\n"
    )
    words = ("-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider")
    result = nightly.run(Part("tests", "two of three", ("{python}", *words, str(tmp_path / "test_x.py"))))
    assert result["green"] and result["figures"] == {"passed": 2, "skipped": 1}


def test_tests_print_figures_of_their_own_and_libraries_talk_after_the_counts(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import atexit, os\n"
        "atexit.register(os.write, 2, b'a library says goodbye\\n')\n"
        "def test_a(capsys):\n"
        "    with capsys.disabled():\n"
        '        print(\'\\n{"chats": {"same": 3}}\')\n'
        "def test_b(): pass\n"
    )
    words = ("-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider")
    result = nightly.run(Part("tests", "talkative", ("{python}", *words, str(tmp_path / "test_x.py"))))
    assert result["green"] and result["figures"] == {"passed": 2, "chats": {"same": 3}}


@pytest.mark.parametrize(("says", "green"), [("no tests ran", False), ("3 passed in 0.1s", True), ("0 skipped", False)])
def test_a_green_part_of_pytest_that_counts_nothing_is_red(says: str, green: bool) -> None:
    """A stand-in for pytest that ends well, whatever it says."""
    result = nightly.run(Part("tests", "says so", ("{python}", "-c", f"print({says!r})", "pytest")))
    assert result["green"] == green and ("told of no test" in result.get("why", "")) != green


def test_other_parts_count_nothing_and_their_last_line_alone_has_figures() -> None:
    code = "print('{{\"page\": 1}}'); print('{{\"cases\": 2}}'); print(' ')"
    result = nightly.run(Part("other", "JSON before the last", ("{python}", "-c", code)))
    assert result["green"] and result["figures"] == {"cases": 2}


def test_each_part_names_its_files() -> None:
    assert all(part.files and all((ROOT / file).exists() for file in part.files) for part in PARTS)


def test_a_night_of_schedules_draws_many_more_with_seeds_of_its_own() -> None:
    """And a failure can be repeated: the seed is the part's own, and stays until it is green."""
    fast, night = settings.get_profile(FAST), settings.get_profile(NIGHT)
    assert fast.derandomize and not night.derandomize and night.print_blob
    assert night.max_examples == TIMES * fast.max_examples and examples(25) == 25
    parts = {part.name: part for part in PARTS if part.name.startswith("schedules")}
    for part in parts.values():
        assert part.cases and part.command[part.command.index("--hypothesis-seed") + 1] == "{seed}"
    assert "tests/runtime/test_shares.py" in parts["schedules"].files
    batchers = {
        f"tests/model_repository/test_{name}.py" for name in ("dynamic_batcher", "sequence_batcher", "ensemble")
    }
    assert batchers <= set(parts["schedules-serve"].files) & set(parts["schedules-serve"].command)


def test_what_draws_more_by_night_has_more_time() -> None:
    """A file's own time goes before the part's --timeout: 30 s were those of a day, and the part was red by night."""
    assert within(30).args == (30,)
    parts = [part for part in PARTS if part.name.startswith("schedules")]
    drawn = [name for part in parts for name in part.files if Path(name).name.startswith("test_")]
    own = [name for name in drawn if "pytestmark = pytest.mark.timeout(" in (ROOT / name).read_text()]
    assert len(drawn) > 10 and not own, f"{own}: tests.support.drawn.within"
    settings.load_profile(NIGHT)
    try:
        assert within(30).args == (30 * TIMES,)
    finally:
        settings.load_profile(FAST)


def test_a_night_goes_on_where_it_was() -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert [p.name for p in nightly.chosen([], now)] == ["ok", "bad"]
    nightly.run(OK)
    assert [p.name for p in nightly.chosen([], now)] == ["bad"]
    assert [p.name for p in nightly.chosen([], now + datetime.timedelta(hours=21))] == ["bad", "ok"], "the absent first"
    assert [p.name for p in nightly.chosen(["o"], now)] == ["ok"], "asked for by name, whatever its age"


def test_the_parts_have_names_of_their_own() -> None:
    assert len({p.name for p in PARTS}) == len(PARTS)


def test_an_environment_is_made_once_and_sees_ours_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pip: what it would install is recorded, and the rest is what `venv` makes."""
    ran: list[list[str]] = []

    def recorded(command: list[str], **kept: object) -> None:
        ran.append([str(word) for word in command])
        if "venv" in ran[-1]:
            made = Path(ran[-1][-1])
            (made / "bin").mkdir(parents=True)
            (made / "bin" / "python").touch()
            (made / "lib" / "python3.11" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr("tools.nightly.packages.subprocess.run", recorded)
    for beside, folder in ((True, tmp_path / "beside"), (False, tmp_path / "alone")):
        for _ in range(2):
            assert environment(folder, ["a==1", "b==2"], beside_ours=beside) == folder / "bin" / "python"
        paths = [p.read_text().splitlines() for p in folder.glob("lib/*/site-packages/*.pth")]
        assert [str(ROOT / "src") in lines for lines in paths] == ([True] if beside else [])
    installs = [command for command in ran if "pip" in command]
    assert len(ran) == 6 and len(installs) == 4, "made once, its packages looked at each time"
    assert all(command[-2:] == ["a==1", "b==2"] for command in installs)


def test_a_changed_tree_is_marked_and_results_do_not_change_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    results = tmp_path / "tools" / "nightly" / "results"
    results.mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    (results / "part.json").write_text("{}")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "RESULTS", results)
    clean = nightly._commit()
    assert len(clean) >= 7 and not clean.endswith("+")
    (results / "part.json").write_text('{"green": true}')
    (results / "another.json").write_text("{}")
    assert nightly._commit() == clean
    (tmp_path / "code.py").write_text("2")
    assert nightly._commit() == f"{clean}+"
