"""The process in which chat templates are rendered: a template is a program from the internet, so it can be killed.

It is started as a script, imports the standard library and Jinja2 only, and its stdin is a connection to its owner (see
`frames.py`). The messages are JSON; until the connection ends:

    {"memory_bytes"}  ->  {"ready": true}
    {"template", "variables"}  ->  {"ready": true} or an error; then, any number of times,
    {"messages", "add_generation_prompt", "extra", "timeout_s", "max_characters"}  ->  {"text"} or {"error", "what"}

`error` is "template" (it is broken), "messages" (raise_exception, or it cannot render these), "memory" or "size".
"""

import datetime
import json
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Reply = dict[str, object]
Messages = list[dict[str, object]]
# What a template can raise while it runs, beside Jinja2's own errors.
_RUNTIME_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class _Refused(jinja2.TemplateError):
    """`raise_exception(...)` was called by the template."""


class _TooLarge(jinja2.TemplateError):
    """The rendered text exceeds the limit."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  Jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As in transformers' `utils/chat_template_utils.py`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without Jinja2's HTML escapes, which a model would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """One template, compiled. raises jinja2.TemplateError where it cannot be"""

    def __init__(self, source: str, variables: dict[str, object]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._variables = variables
        self._reads_parts = any(
            _iterates_content(node) for node in environment.parse(source).find_all(jinja2.nodes.For)
        )

    def render(self, messages: Messages, add_generation_prompt: bool, extra: dict[str, object], limit: int) -> str:
        """At most `limit` characters. A list of text parts stays one for a template that loops over content."""
        given = {"tools": None, "documents": None, **self._variables, **extra}
        given |= {"messages": [self._plain(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        left = limit
        for part in self._template.generate(given):
            left -= len(part)
            if left < 0:
                raise _TooLarge(f"more than {limit} characters")
            parts.append(part)
        return "".join(parts)

    def is_broken(self) -> bool:
        """It cannot even render a plain greeting, so the caller's messages are not what is wrong."""
        try:
            self.render([{"role": "user", "content": "Hi"}], True, {}, 10**6)
        except _Refused:
            return False
        except (jinja2.TemplateError, *_RUNTIME_ERRORS):
            return True
        return False

    def _plain(self, message: dict[str, object]) -> dict[str, object]:
        content = message.get("content")
        if not isinstance(content, list) or self._reads_parts:
            return message
        texts = [part["text"] for part in cast(list[dict[str, str]], content)]
        return {**message, "content": "\n".join(texts)}


def _iterates_content(loop: jinja2.nodes.For) -> bool:
    """`for part in message.content`, `message['content']`, or a variable called content."""
    source = loop.iter
    while isinstance(source, jinja2.nodes.Filter) and source.node is not None:
        source = source.node
    match source:
        case jinja2.nodes.Getattr():
            return source.attr == "content"
        case jinja2.nodes.Getitem():
            return isinstance(source.arg, jinja2.nodes.Const) and source.arg.value == "content"
        case jinja2.nodes.Name():
            return source.name == "content"
    return False


def _answer(renderer: Renderer, request: dict[str, Any]) -> Reply:
    try:
        text = renderer.render(
            request["messages"], request["add_generation_prompt"], request["extra"], request["max_characters"]
        )
    except _Refused as error:
        return {"error": "messages", "what": str(error)}
    except _TooLarge as error:
        return {"error": "size", "what": str(error)}
    except MemoryError:
        return {"error": "memory", "what": "out of memory"}
    except (jinja2.TemplateError, *_RUNTIME_ERRORS) as error:
        return {"error": "template" if renderer.is_broken() else "messages", "what": f"{type(error).__name__}: {error}"}
    return {"text": text}


def _serve(read: Callable[[], dict[str, Any] | None], write: Callable[[Reply], None]) -> None:
    limits, load = read(), None
    if limits is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
        write({"ready": True})
        load = read()  # now the parent's short clock runs: compiling folds constants, which can take for ever
    if load is None:
        return
    try:
        renderer = Renderer(load["template"], load["variables"])
    except (jinja2.TemplateError, MemoryError, *_RUNTIME_ERRORS) as error:
        line = getattr(error, "lineno", None)
        write({"error": "template", "what": (str(error) or "out of memory") + (f" (line {line})" if line else "")})
        return
    write({"ready": True})
    while (request := read()) is not None:
        # the parent kills this process when its time is over; this alarm does it where the parent is dead
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + 1.0)
        reply = _answer(renderer, request)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        write(reply)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the parent's business
    owner = Connection(0)

    def read() -> dict[str, Any] | None:
        try:
            return cast(dict[str, Any], json.loads(owner.recv_bytes()))
        except (EOFError, OSError):
            return None

    def write(reply: Reply) -> None:
        owner.send_bytes(json.dumps(reply).encode())

    _serve(read, write)


if __name__ == "__main__":
    main()
