"""One client against a server of ours, in an environment of its own.

    python -m tools.clients openai
    python -m tools.clients openai --url http://127.0.0.1:8000     a server that runs already

Installs the client's packages into build/clients/NAME, serves SmolLM2-135M-Instruct (or `tiny`, where the catalogue
says so), and runs scripts/NAME_client.py there, which prints one line of JSON for each thing that it tried. Agents
(codex, claude-code) come by npm, some 400 MB each, and ask a server whose model is scripted. Exit code 0: all worked
but the gaps that the catalogue expects.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from millrace.bench.run.server_process import ServerProcess
from tools.clients.catalogue import CLIENTS, Gap
from tools.clients.scripted import scripted
from tools.nightly.packages import BUILD, environment, npm_commands, smollm2

HERE = Path(__file__).parent
FOLDER = BUILD / "clients"
MODEL = "served"
TIMEOUT_S = 1800


@contextmanager
def served(url: str | None, tiny: bool) -> Iterator[str]:
    if url is not None:
        yield url
        return
    of_model = ("--precision", "fp32") if tiny else ("--max-context", "4096")
    flags = ("--served-model-name", MODEL, "--log-level", "warning", *of_model)
    with ServerProcess("tiny" if tiny else smollm2(), flags, start_s=300) as server:
        yield server.url


def tried(python: Path, script: Path, url: str, commands: Path | None = None) -> tuple[list[dict[str, Any]], str]:
    """What the script reports, and what it wrote to stderr. commands: a folder of some that it calls"""
    home = FOLDER / "home"
    home.mkdir(parents=True, exist_ok=True)
    variables = {
        "PATH": f"{commands or python.parent}:{os.environ['PATH']}", "HOME": str(home), "OPENAI_API_KEY": "none",
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


def judged(lines: Sequence[Mapping[str, Any]], gaps: Mapping[str, Gap]) -> list[str]:
    """What is not as the catalogue says."""
    wrong = []
    for tried in lines:
        name, gap = tried["check"], gaps.get(tried["check"])
        if tried["ok"] and gap:
            wrong.append(f"{name} works: take the gap out of the catalogue")
        elif not tried["ok"] and not gap:
            wrong.append(f"{name}: {tried['why']}")
        elif not tried["ok"] and gap and gap.says not in tried["why"]:
            wrong.append(f'{name}: fails as expected, but not with "{gap.says}": {tried["why"]}')
    names = {t["check"] for t in lines}
    wrong += [f"{gap}: the catalogue expects it, and nothing tried it" for gap in gaps if gap not in names]
    return wrong if lines else ["nothing was tried"]


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("client", choices=list(CLIENTS))
    parser.add_argument("--url", help=f"a server that runs already, with its model named {MODEL}")
    args = parser.parse_args()
    client = CLIENTS[args.client]
    script, folder = HERE / "scripts" / f"{args.client.replace('-', '_')}_client.py", FOLDER / args.client
    if client.npm:
        commands = npm_commands(folder, client.npm)
        with scripted(MODEL) if args.url is None else nullcontext(args.url) as url:
            lines, errors = tried(Path(sys.executable), script, url, commands)
    else:
        python = environment(folder, client.packages)
        with served(args.url, client.tiny) as url:
            lines, errors = tried(python, script, url)
    for line in lines:
        expected = f" (expected: {client.gaps[line['check']].why})" if line["check"] in client.gaps else ""
        print(f"{'ok  ' if line['ok'] else 'FAIL'} {line['check']}{expected} {'' if line['ok'] else line['why']}")
    wrong = judged(lines, client.gaps)
    if wrong:
        print(errors[-3000:], "\n".join(wrong), sep="\n")
    worked = sum(t["ok"] for t in lines)
    print(
        json.dumps(
            {
                "packages": [client.npm] if client.npm else client.packages,
                "worked": worked,
                "gaps": {name: gap.why for name, gap in client.gaps.items()},
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
