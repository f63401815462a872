"""One side of benchmarks/versions.py: a checkout's engine at the end of a pipe.

Run by the Python of that checkout, whose own `benchmarks.shapes` and `millrace` it finds: so it asks for nothing that
an older one would not have.
"""

import hashlib
import json
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.shapes import random_source
from millrace.compile.build import BuildOptions, plan_engine, write_engine
from millrace.compile.precision import precision_map
from millrace.kernels.library import usable_isas


def first_module(*names: str) -> Any:
    """Import the first of these modules that the checkout has: those of rooms moved on 2026-11-30."""
    return import_module(next(name for name in names if find_spec(name.rpartition(".")[0]) and find_spec(name)))


Engine = first_module("millrace.engine.artifact.engine", "millrace.engine.engine").Engine
dummy_step = first_module("millrace.engine.dummy_step", "millrace.engine.dummy").dummy_step

CONTEXT, PROMPT, AT, NEW_TOKENS = 1024, 512, 128, 8


def served(shape: str, precision: str, threads: int) -> None:
    """Reads the name of a piece of work, answers with its seconds and a digest of its tokens; until the pipe ends."""
    with tempfile.TemporaryDirectory() as temporary:
        source, folder = random_source(shape, CONTEXT), Path(temporary) / "engine"
        asked = json.loads(precision) if precision.startswith("{") else precision
        plan = plan_engine(source, BuildOptions(precision=precision_map(asked), tiles="amx" in usable_isas()))
        write_engine(source, plan, folder, name=shape)
        executor = Engine.open(folder).executor(n_pages=16 * CONTEXT // 64, threads=threads)
        pages = executor.limits.n_pages
        size = executor.limits.max_step_tokens
        steps = {
            f"prefill-{PROMPT}": [dummy_step([min(size, PROMPT - at)], at, pages) for at in range(0, PROMPT, size)]
        }
        for n in (1, 16):
            steps[f"decode-{n}"] = [dummy_step([1] * n, AT + i, pages, seed=i) for i in range(NEW_TOKENS)]
        print(json.dumps({"isa": executor.isa}), flush=True)
        for line in sys.stdin:
            started = time.perf_counter()
            tokens = [executor.run(step).tokens.tolist() for step in steps[line.strip()]]
            seconds = time.perf_counter() - started
            digest = hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()
            print(json.dumps({"seconds": seconds, "tokens": digest}), flush=True)


if __name__ == "__main__":
    served(sys.argv[1], sys.argv[2], int(sys.argv[3]))
