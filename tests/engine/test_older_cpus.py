"""On CPUs that lack an instruction set: the whole product under an emulator that reports another CPU's features.

Nothing of ours is replaced, so what is tested is the native core's own choice and every refusal that follows from it.
"""

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.artifact.engine import Engine
from millrace.engine.artifact.engine_tables import read_program_table
from millrace.engine.artifact.tactics import Choice, Comparison, TacticTable, TacticTiming, TunedRegion, write_tactics
from millrace.kernels.library import usable_isas
from tests.fuzz.originals import write_checkpoint
from tests.support.engines import build, last_logits

EMULATOR = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
pytestmark = pytest.mark.skipif(
    not EMULATOR or platform.machine() != "x86_64", reason="needs an x86-64 and qemu-user-static"
)
PROMPT = [1, 5, 9, 200]
# CPU as the emulator names it -> what it can run, and what it cannot with the reason
CPUS = {
    "Haswell": (["avx2", "scalar"], {"avx512": "AVX-512 F, BW, DQ, VL, VNNI and BF16"}),
    "Nehalem": (["scalar"], {"avx512": "AVX-512 F, BW, DQ, VL, VNNI and BF16", "avx2": "AVX2, FMA and F16C"}),
}
ASKED = """
import contextlib, io, json, sys
from pathlib import Path
from millrace.cli.main import run
from millrace.engine.artifact.engine import Engine
from millrace.errors import MachineError
from millrace.kernels.library import usable_isas
from tests.support.engines import build, last_logits
here, prompt, lacking, cpu = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
def screen(*arguments):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        return run([str(a) for a in arguments]), said.getvalue()
engine = Engine.open(here / "there")
executor = engine.executor(n_pages=4, threads=1)
told = {"usable": usable_isas(), "isa": executor.isa, "logits": last_logits(engine, executor, [prompt]).tobytes().hex()}
executor.close()
told["identity"] = build(here / "checkpoint", here / cpu, "fp32").manifest.identity
told["inspect"] = screen("inspect", here / "there")
for isa in lacking:
    try:
        engine.executor(n_pages=4, isa=isa)
    except MachineError as error:
        told[isa] = [error.what, error.expected, error.fix]
    told[f"doctor {isa}"] = screen("doctor", "--isa", isa)
    told[f"generate {isa}"] = screen("generate", here / "there", "-p", "Once", "--isa", isa)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Built and tuned where all instruction sets are."""
    folder = tmp_path_factory.mktemp("engines")
    engine = build(write_checkpoint(folder / "checkpoint"), folder / "there", "fp32")
    machine: dict[str, str | int] = {"cpu": "a newer one", "isa": "avx512", "cores": 2}
    products = [i for i, step in enumerate(read_program_table(engine.folder).calls) if step.kernel == "matmul"]
    timed = Comparison("ahead", [TacticTiming(value, 1.0, 1.0, 1.0, 1) for value in (0, 64)], 64)
    region = TunedRegion("products", "matmul", products, [Choice(1, {"ahead": 64}, [timed])])
    write_tactics(engine.folder, TacticTable(machine, 2, [region]))
    return Engine.open(engine.folder)


def told_by(cpu: str, engine: Engine) -> dict[str, Any]:
    assert EMULATOR
    lacking = json.dumps(list(CPUS[cpu][1]))
    words = [engine.folder.parent, json.dumps(PROMPT), lacking, cpu]
    command = [EMULATOR, "-cpu", cpu, sys.executable, "-c", ASKED, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", ["Haswell", "Nehalem"])
def test_what_a_cpu_lacks_is_refused_and_the_rest_is_the_same(cpu: str, engine: Engine) -> None:
    usable, lacking = CPUS[cpu]
    told = told_by(cpu, engine)
    assert told["usable"] == usable and told["isa"] == usable[0]
    assert told["identity"] == engine.manifest.identity, "built there, it is the same engine"
    executor = engine.executor(n_pages=4, threads=1)
    assert executor.isa == usable_isas()[0]
    assert told["logits"] == last_logits(engine, executor, [PROMPT]).tobytes().hex(), "the same bits"
    executor.close()
    code, shown = told["inspect"]
    assert code == 0 and "for 2 threads on a newer one, avx512, 2 cores; here is" in shown and usable[0] in shown
    for isa, why in lacking.items():
        what, expected, fix = told[isa]
        assert what == f'instruction set "{isa}" cannot run here: it needs {why}'
        assert expected == "one of " + ", ".join(usable) and "--isa" in fix
        for command in ("generate", "doctor"):
            code, shown = told[f"{command} {isa}"]
            assert code == 2 and shown.startswith(f'error: instruction set "{isa}" cannot run here: it needs '), shown
            assert f"expected: {expected}" in shown and f"to fix:   {fix}" in shown and shown.count("\n") == 3
