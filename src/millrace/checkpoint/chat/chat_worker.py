"""The process that renders chat templates: a template is an untrusted program, so it must be possible to kill it.

It is started as a script, imports the standard library and Jinja2 only, and its stdin is a connection to its parent
(see `worker_process.py`). Messages are JSON; until the connection ends:

    {"memory_bytes"}  ->  {"ready": true}
    {"templates", "first", "variables"}  ->  {"ready": true} or an error; then, any number of times,
    {"template", "messages", "add_generation_prompt", "extra", "timeout_s", "max_characters", "preamble", "merges"}
        ->  {"text"} or {"error", "what"}
    {"template", "probe", "timeout_s"}  ->  {"tools", "calls"}: whether the template renders tools and their calls

`error` is "template" (it is broken), "messages" (raise_exception, or it cannot render these), "memory" or "size".
"""

import datetime
import importlib.util
import json
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

if TYPE_CHECKING:
    from millrace.checkpoint.chat import chat_shapes as shapes
else:

    def _sibling(name):
        """Load a module of this folder, which is not on the import path of this process."""
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    shapes = _sibling("chat_shapes")

Reply = dict[str, object]
Message = dict[str, object]
Messages = list[Message]
# Errors that a template can raise while it runs, in addition to Jinja2's own.
_RUNTIME_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class _Refused(jinja2.TemplateError):
    """`raise_exception(...)` was called by the template."""


class _TooLarge(jinja2.TemplateError):
    """The rendered text exceeds the limit."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  Jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Create the environment, like transformers' `utils/chat_template_utils.py`."""
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
    """Serialize to JSON without Jinja2's HTML escapes, which the model would see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_PROBE_CHARACTERS = 10**6


class Template:
    """One compiled template. raises jinja2.TemplateError if it cannot be compiled"""

    def __init__(self, source: str, variables: dict[str, object]) -> None:
        self._template, self._variables = _environment().from_string(source), variables

    def render(self, messages: Messages, add_generation_prompt: bool, extra: dict[str, object], limit: int) -> str:
        """Return at most `limit` characters, or raise _TooLarge."""
        variables = {"tools": None, "documents": None, **self._variables, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        left = limit
        for part in self._template.generate(variables):
            left -= len(part)
            if left < 0:
                raise _TooLarge(f"more than {limit} characters")
            parts.append(part)
        return "".join(parts)

    def probe(self, messages: Messages, has_tools: bool) -> str | None:
        """Return the text of a short conversation, or None if the template cannot render it."""
        extra: dict[str, object] = {"tools": [shapes.TOOL]} if has_tools else {}
        try:
            return self.render(messages, True, extra, _PROBE_CHARACTERS)
        except (jinja2.TemplateError, MemoryError, *_RUNTIME_ERRORS):
            return None


class Renderer:
    """Renders conversations in a form that the template supports. raises jinja2.TemplateError if it is broken"""

    def __init__(self, source: str, variables: dict[str, object]) -> None:
        self._template = Template(source, variables)
        self.shapes = shapes.TemplateProbe(self._template.probe)

    def render(self, request: dict[str, Any]) -> str:
        """Render the first variant of the conversation that the template accepts.

        raises the first variant's error if it accepts none
        """
        tries, error = self.shapes.attempts(request["messages"], request["preamble"], request["merges"]), None
        has_tools = bool(request["extra"].get("tools"))
        before: Messages | None = None
        for messages in tries:
            if messages == before:
                continue
            before = messages
            try:
                fit = [self.shapes.fit(message, has_tools) for message in messages]
                return self._template.render(
                    fit, request["add_generation_prompt"], request["extra"], request["max_characters"]
                )
            except _TooLarge:
                raise
            except (jinja2.TemplateError, *_RUNTIME_ERRORS) as problem:
                error = error or problem
        assert error is not None, "there is at least one attempt"
        raise error

    def is_broken(self) -> bool:
        """Return whether even a plain greeting fails, so that the client's messages are not at fault."""
        try:
            self._template.render([{"role": "user", "content": "Hi"}], True, {}, 10**6)
        except _Refused:
            return False
        except (jinja2.TemplateError, *_RUNTIME_ERRORS):
            return True
        return False


def _answer(renderer: Renderer, request: dict[str, Any]) -> Reply:
    if request.get("probe"):
        return {"tools": renderer.shapes.tools_render(), "calls": renderer.shapes.calls_render()}
    try:
        text = renderer.render(request)
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
        # from here the parent's short timeout applies: compiling folds constants, which can take arbitrarily long
        load = read()
    if load is None:
        return
    renderers: dict[str, Renderer] = {}
    if problem := _compiled(renderers, load, load["first"]):
        write(problem)
        return
    write({"ready": True})
    while (request := read()) is not None:
        # The parent kills this process after the timeout; the alarm does it if the parent is dead.
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + 1.0)
        name = request["template"]
        reply = _compiled(renderers, load, name) or _answer(renderers[name], request)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        write(reply)


def _compiled(renderers: dict[str, Renderer], load: dict[str, Any], name: str) -> Reply | None:
    """Compile the template `name` into `renderers` unless it is there. Return the error if it is broken."""
    if name in renderers:
        return None
    try:
        renderers[name] = Renderer(load["templates"][name], load["variables"])
    except (jinja2.TemplateError, MemoryError, *_RUNTIME_ERRORS) as error:
        line = getattr(error, "lineno", None)
        return {"error": "template", "what": (str(error) or "out of memory") + (f" (line {line})" if line else "")}
    return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
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
