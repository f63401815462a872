"""Triton's own tests, against a server of ours.

    python -m tools.triton_tests --qa server/qa                     all suites, and a result file
    python -m tools.triton_tests --qa server/qa --suite http --suite parameters

--qa is the folder `qa` of a checkout of Triton's server repository. Its tests run as they are, in a copy, with models
that are made here. They ask localhost at Triton's ports 8000, 8001 and 8002, which must be free. The client's packages
come into build/triton-tests. Exit code 0: nothing failed.
"""

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, provenance, write_result
from tools.nightly.packages import BUILD, environment
from tools.triton_tests.catalogue import SUITES, Run, Suite
from tools.triton_tests.repositories import Repository

PACKAGES = (
    "tritonclient[http,grpc]==2.73.0", "numpy", "pytest", "pytest-timeout", "requests", "sseclient-py",
    "psutil",
)  # fmt: skip
PORTS = ("--port", "8000", "--grpc-port", "8001", "--metrics-port", "8002")
READY_URL = "http://127.0.0.1:8000/v2/health/ready"
UNITTESTS_URL = "http://127.0.0.1:8000/v2/models/unittests/infer"
START_S, STOP_S, TEST_S, SUITE_S = 20, 40, 600, 1800


@contextmanager
def served(run: Run, folder: Path, tested: Path | None = None) -> Iterator[None]:
    """A server with the run's models, its output in the log beside the tests. raises SystemExit if it does not start

    tested: a file whose tests the model `unittests` has to run
    """
    models = folder / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir()
    run.models(Repository(models))
    if tested is not None:
        shutil.copy(tested, models / "unittests" / "1" / "tested.py")
    command = [
        sys.executable, "-P", "-m", "millrace", "serve", "--model-repository", str(models), *PORTS,
        "--allow-client-shm", "--drain-timeout-s", "10", *run.flags,
    ]  # fmt: skip
    with (folder / run.log).open("wb") as log:
        variables = {**os.environ, **run.variables}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=variables)
        try:
            wait_until_ready(process, folder / run.log)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Or, if some of its models never are, for START_S."""
    end_s, answers = time.monotonic() + START_S, False
    while time.monotonic() < end_s and process.poll() is None:
        try:
            urllib.request.urlopen(READY_URL, timeout=2).close()
            return
        except urllib.error.HTTPError as error:
            answers = True
            if error.code == 403:  # restricted
                return
            time.sleep(0.1)
        except OSError:
            time.sleep(0.1)
    if process.poll() is None and answers:
        return
    raise SystemExit(f"the server did not start; it wrote:\n{log.read_text(errors='replace')[-3000:]}")


def functions(file: Path) -> list[str]:
    """Names of the file's test functions, in its order."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return [
        n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")
    ]


def tried(python: Path, file: Path, run: Run, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What became of each test function, and why."""
    report = file.parent / "report.xml"
    chosen = " or ".join(
        f"({name} and not {name}_)" if any(o.startswith(f"{name}_") for o in names) else name for name in names
    )
    command = [
        str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", f"--junitxml={report}",
        "-k", chosen, file.name,
    ]  # fmt: skip
    variables = {
        **os.environ,
        **run.variables,
        "SERVER_LOG": str(file.parent / run.log),
        "PYTHONPATH": str(file.parent),
    }
    subprocess.run(command, cwd=file.parent, env=variables, stdout=subprocess.DEVNULL, timeout=SUITE_S, check=False)
    found: dict[str, tuple[str, str]] = {}
    for case in ET.parse(report).iter("testcase"):
        outcome, why = "pass", ""
        for kind in case:
            if kind.tag in ("failure", "error"):
                outcome, why = "fail", (kind.get("message") or "").splitlines()[0][:300] if kind.get("message") else ""
            elif kind.tag == "skipped" and outcome == "pass":
                outcome, why = "cannot run", kind.get("message") or ""
        name = (case.get("name") or "").partition("[")[0]
        if found.get(name, ("", ""))[0] != "fail":
            found[name] = outcome, why
    return {name: found.get(name, ("fail", "it did not run")) for name in names}


def tried_in_a_model(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """As `tried`, of tests that the model `unittests` runs."""
    asked = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [0]}]}
    request = urllib.request.Request(UNITTESTS_URL, json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=TEST_S) as answer:
        found = json.loads(json.load(answer)["outputs"][0]["data"][0])
    return {name: tuple(found.get(name, ("fail", "it did not run"))) for name in names}


def suite_result(python: Path, qa: Path, name: str, suite: Suite) -> dict[str, Any]:
    file = qa / suite.file
    if not file.is_file():
        return {"file": suite.file, "missing": True}
    there = functions(file)
    cases = [{"test": t, "outcome": "cannot run", "why": why} for t, why in suite.cannot.items() if t in there]
    for number, run in enumerate(suite.runs):
        names = [t for t in (run.only or there) if t in there and t not in suite.cannot]
        with served(run, file.parent, file if suite.is_model else None):
            outcomes = tried_in_a_model(names) if suite.is_model else tried(python, file, run, names)
        for test, (outcome, why) in outcomes.items():
            cases.append({"test": f"{test}[{number}]" if len(suite.runs) > 1 else test, "outcome": outcome, "why": why})
    counts = Counter(case["outcome"] for case in cases)
    print(f"{name:24} {counts['pass']:4} pass {counts['fail']:4} fail {counts['cannot run']:4} cannot run", flush=True)
    return {
        "file": suite.file, "counts": dict(counts),
        "failures": [{"test": c["test"], "why": c["why"]} for c in cases if c["outcome"] == "fail"],
        "cannot_run": [{"test": c["test"], "why": c["why"]} for c in cases if c["outcome"] == "cannot run"],
    }  # fmt: skip


def total(suites: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All suites together: how many ran, and the share of those that passed."""
    counts: Counter[str] = Counter()
    for suite in suites.values():
        counts.update(suite.get("counts", {}))
    ran = counts["pass"] + counts["fail"]
    return {"ran": ran, **counts, "pass_percent": round(100 * counts["pass"] / ran, 1) if ran else None}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.triton_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--qa", type=Path, required=True, help="folder `qa` of a checkout of Triton's server repository"
    )
    parser.add_argument(
        "--suite", action="append", choices=sorted(SUITES), help="one of them; repeatable (default: all)"
    )
    parser.add_argument("--python", type=Path, help="interpreter that has the client's packages (default: one is made)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    if not (arguments.qa / "common").is_dir():
        parser.error(f"{arguments.qa} is no `qa` folder of Triton's server repository: it has no folder common")
    python = arguments.python or environment(BUILD / "triton-tests", PACKAGES)
    result = provenance("tools.triton_tests")
    with tempfile.TemporaryDirectory() as folder:
        qa = Path(folder) / "qa"
        shutil.copytree(arguments.qa, qa)
        suites = {name: suite_result(python, qa, name, SUITES[name]) for name in arguments.suite or SUITES}
    result |= {"client": PACKAGES[0], "total": total(suites), "suites": suites}
    print(json.dumps(result["total"]))
    print(write_result("triton-tests", result, arguments.out))
    return 1 if result["total"].get("fail") else 0


if __name__ == "__main__":
    sys.exit(main())
