"""Runs `millrace verify`, whose options are in `options.py`: `--help` imports nothing else."""

import json
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from millrace import __version__
from millrace.bench.run.server_process import ServerProcess
from millrace.cli.console import note, print_json
from millrace.errors import ConfigError, sanitize
from millrace.settings import read_bounded

MAX_BYTES = 64 * 2**20
TIMEOUT_S = 600.0
MAX_NAME = 512  # characters of a model's name
PATHS = ("/v1/chat/completions", "/v1/completions")
RECEIPT = ("path", "release", "engine", "seed", "prompt", "answers")


def run(model: str, request_file: Path, response_file: Path, as_json: bool) -> None:
    """Run `millrace verify`."""
    request, response = _object(request_file), _object(response_file)
    receipt = _receipt(response)
    with ServerProcess(model, ("--log-level", "warning", *_name_flags(request, response)), start_s=TIMEOUT_S) as server:
        again = _ask(server.url + receipt["path"], {**request, "model": None, "seed": receipt["seed"], "receipt": True})
    now = again["millrace"]["receipt"]
    differs = [name for name in ("engine", "prompt", "answers") if _json(now[name]) != _json(receipt[name])]
    # the digests are of tokens: what was made of them counts, too
    compared = {
        "choices": (_choices(again), _choices(response)),
        "usage": (_usage(again), _usage(response)),
        "model": (request.get("model") or again["model"], response.get("model")),
        "seed": (receipt["seed"], response["millrace"].get("seed")),
    }
    if not request.get("model") and receipt["release"] == __version__:  # else it was served by a name that nobody knows
        compared["system_fingerprint"] = again.get("system_fingerprint"), response.get("system_fingerprint")
    differs += [name for name, (computed, claimed) in compared.items() if _json(computed) != _json(claimed)]
    if as_json:
        print_json({"same": not differs, "differs": differs, "receipt": receipt, "again": now})
    if differs:
        raise ConfigError(*_error_parts(differs, receipt, now, compared))
    if not as_json:
        n = len(receipt["answers"])
        note(f"the same: {n} answer{'s' if n > 1 else ''} of the engine {receipt['engine']}, seed {receipt['seed']}")


def _error_parts(
    differs: list[str], receipt: dict[str, Any], now: dict[str, Any], compared: dict[str, tuple[Any, Any]]
) -> tuple[str, str, str]:
    if "engine" in differs:
        message = f"the receipt is of the engine {sanitize(str(receipt['engine']))}, and this one is {now['engine']}"
        releases = f" (release {sanitize(str(receipt['release']))}; this is {__version__})"
        return (
            message + releases,
            "the same engine",
            "name the engine folder that answered, or build it with that release",
        )
    if "prompt" in differs:
        return "the request has another prompt", "the request that was answered", "name the file of that request"
    if "answers" in differs:
        fix = "name the request as it was asked; where it is that, report it: on the same engine this must not happen"
        return "the answer is another one", "the same tokens", fix
    if "choices" in differs:
        return "the response's choices are not what its tokens say", "the response as it came", "do not trust that file"
    name = differs[0]
    computed, claimed = compared[name]
    message = (
        f"the response's {name} is {sanitize(_json(claimed))[:200]}, and should be {sanitize(_json(computed))[:200]}"
    )
    return message, "the response as it came", "do not trust that file"


def _name_flags(request: dict[str, Any], response: dict[str, Any]) -> tuple[str, ...]:
    """Return the flag that serves MODEL by the name that the response gives it: its fingerprint depends on it."""
    name = response.get("model")
    usable = isinstance(name, str) and 0 < len(name) <= MAX_NAME and "*" not in name and name.isprintable()
    return (f"--served-model-name={name}",) if usable and not request.get("model") else ()


def _json(value: object) -> str:
    """Return a text that is equal only for equal JSON: in Python 1 is 1.0 and true."""
    return json.dumps(value, sort_keys=True)


def _usage(response: dict[str, Any]) -> Any:
    """Return the counts of tokens, without those that the prefix cache had then: at most the prompt's."""
    usage = json.loads(json.dumps(response.get("usage")))
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if isinstance(details, dict):
        cached, most = details.get("cached_tokens"), usage.get("prompt_tokens")
        if type(cached) is int and type(most) is int and 0 <= cached <= most:
            del details["cached_tokens"]
    return usage


def _choices(response: dict[str, Any]) -> Any:
    """Return the choices without the ids of tool calls, which are random."""
    choices = json.loads(json.dumps(response.get("choices")))
    for choice in choices if isinstance(choices, list) else ():
        message = choice.get("message") if isinstance(choice, dict) else None
        for call in (message.get("tool_calls") or ()) if isinstance(message, dict) else ():
            if isinstance(call, dict):
                call.pop("id", None)
    return choices


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_bounded(path, MAX_BYTES), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "a JSON object", "name another file") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no JSON object", "a request, or its response", "name another file")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, because readers differ in which one counts. raises ValueError"""
    document = dict(pairs)
    if len(document) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {sanitize(twice)[:100]!r} twice")
    return document


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _receipt(response: dict[str, Any]) -> dict[str, Any]:
    block = response.get("millrace")
    receipt = block.get("receipt") if isinstance(block, dict) else None
    if not isinstance(receipt, dict) or any(name not in receipt for name in RECEIPT) or receipt["path"] not in PATHS:
        raise ConfigError("the response has no receipt", "millrace.receipt in it", 'ask with "receipt": true')
    return receipt


def _ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer
    except urllib.error.HTTPError as error:
        error_text = sanitize(error.read(4096).decode("utf-8", "replace"))
        raise ConfigError(
            f"the request is refused: {error_text}", "the request that was answered", "name its file"
        ) from None
