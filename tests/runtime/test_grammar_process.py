"""Hostile schemas and grammars end in a refusal, and at worst with the process that compiles them: never this one."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import MachineError, RequestError
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output import grammar_process, grammar_worker
from millrace.runtime.structured_output.grammar import GrammarCompiler
from millrace.runtime.structured_output.grammar_bounds import (
    MAX_ALL_PROPERTIES,
    MAX_CHAIN,
    MAX_GBNF_RULES,
    MAX_PROPERTIES,
    MAX_RULES,
)
from millrace.runtime.structured_output.grammar_process import GrammarProcess, in_deep_stack
from millrace.serve.http.errors import problem_of
from tests.serve.support import VOCABULARY, tokenizer

Forms = dict[str, Any]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    words = tokenizer()
    assert words.eos_token_id is not None
    return GrammarCompiler(words, VOCABULARY, [words.eos_token_id])


def chain(link: Callable[[dict[str, str]], Any]) -> Callable[[int], Forms]:
    def of(n: int) -> Forms:
        parts = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(n)}
        return {"json": {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{n}": {"type": "string"}}}}

    return of


def rules(line: str, end: str, head: str) -> Callable[[int], Forms]:
    def of(n: int) -> Forms:
        each = [line.format(i, i + 1) for i in range(n)]
        return {"grammar": "\n".join([head, *each, end.format(n)])}

    return of


CHAINS: dict[str, Callable[[int], Forms]] = {
    "$ref": chain(lambda part: part),
    "anyOf": chain(lambda part: {"anyOf": [part, {"type": "null"}]}),
    "oneOf": chain(lambda part: {"oneOf": [part]}),
    "allOf": chain(lambda part: {"allOf": [part]}),
    "items": chain(lambda part: {"type": "array", "items": part}),
    "prefixItems": chain(lambda part: {"type": "array", "prefixItems": [part]}),
    "properties": chain(lambda part: {"type": "object", "properties": {"a": part}}),
    "additionalProperties": chain(lambda part: {"type": "object", "additionalProperties": part}),
    "Lark's rules": rules("r{0}: r{1}", 'r{0}: "a"', "start: r0"),
    "Lark's terminals": rules("R{0}: R{1}", 'R{0}: "a"', "start: R0"),
    "GBNF": rules('r{0} ::= r{1} "b"', 'r{0} ::= "a"', "root ::= r0"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_references_is_bounded(grammars: GrammarCompiler, name: str) -> None:
    with pytest.raises(RequestError, match=r"chain of more than|rules and terminals") as error:
        grammars.matchers(StructuredOutputsParams(**CHAINS[name](1500), field_name="guided_json"), 1)
    assert error.value.param == "guided_json"
    grammars.matchers(StructuredOutputsParams(**CHAINS[name](MAX_CHAIN // 8)), 1)


@pytest.mark.parametrize("name", ["$ref", "allOf", "Lark's rules", "Lark's terminals", "GBNF"])
def test_the_longest_chain_is_compiled(grammars: GrammarCompiler, name: str) -> None:
    most = {"allOf": MAX_CHAIN // 2, "GBNF": MAX_GBNF_RULES}.get(name, MAX_CHAIN)
    grammars.matchers(StructuredOutputsParams(**CHAINS[name](most - 4)), 1)


def test_an_inline_schema_of_a_grammar_is_bounded_too(grammars: GrammarCompiler) -> None:
    for schema in (CHAINS["$ref"](1500)["json"], {"type": "integer", "minimum": -(2**70)}, {"uniqueItems": True}):
        with pytest.raises(RequestError, match=r"chain of more|exactly|uniqueItems"):
            lark = f'start: "%json" x // %json {{\nx: %json {json.dumps(schema)} "!"'
            grammars.matchers(StructuredOutputsParams(grammar=lark), 1)
    grammars.matchers(StructuredOutputsParams(grammar='start: %json {"format": "x", "uniqueItems": false} "%json"'), 1)


def keys(n: int, n_objects: int = 1) -> Forms:
    parts = [
        {"type": "object", "properties": {f"{i}_{j}": {"type": "null"} for j in range(n)}} for i in range(n_objects)
    ]
    return {"json": {"type": "array", "prefixItems": parts}}


@pytest.mark.parametrize("form, says", [
    (keys(MAX_PROPERTIES + 1), f"{MAX_PROPERTIES + 1} properties"), (keys(3000), "3000 properties"),
    (keys(300, MAX_ALL_PROPERTIES // 300 + 1), f"more than {MAX_ALL_PROPERTIES} properties together"),
    ({"grammar": "start: A\n" + "\n".join(f'r{i}: "a"' for i in range(MAX_RULES + 1))}, f"more than {MAX_RULES} rules"),
    ({"grammar": "root ::= a\n" + '\na ::= "b"' * 3000}, f"more than {MAX_GBNF_RULES} rules"),
], ids=lambda part: str(part)[:30])  # fmt: skip
def test_counts_are_bounded(grammars: GrammarCompiler, form: Forms, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        grammars.matchers(StructuredOutputsParams(**form), 1)


def test_what_is_within_the_bounds_is_compiled(grammars: GrammarCompiler) -> None:
    grammars.matchers(StructuredOutputsParams(**keys(MAX_PROPERTIES)), 1)
    grammars.matchers(
        StructuredOutputsParams(grammar="start: A\nA: /a/" + "".join(f"\nr{i}: A" for i in range(900))), 1
    )


FAULTS = {
    "dies": "import signal; signal.raise_signal(signal.SIGSEGV)",
    "aborts": "import os; os.abort()",
    "fills memory": "b'x' * (1 << 40)",
    "has no end": "exec('while True: pass')",
    "recurses": "import faulthandler; faulthandler._stack_overflow()",
}
WORKER = """
import sys
sys.path[:0] = {path!r}
from millrace.runtime.structured_output import grammar_worker

def answer(self, request):
    if request["text"] == "fault":
        {fault}
    return {{"lark": request["text"]}}

grammar_worker._WorkerCompiler.answer = answer
grammar_worker.main()
"""


@contextmanager
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> Iterator[GrammarProcess]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(path=[str(Path(grammar_process.__file__).parents[2])], fault=fault))
    monkeypatch.setattr(grammar_process, "_WORKER", script)
    monkeypatch.setattr(grammar_process, "LONG_CPU_S", 0.3)
    made = GrammarProcess(16, {0: b"<end>"}, [0], None)
    made.start()
    yield made


@pytest.mark.parametrize("name", FAULTS)
def test_what_ends_the_compiling_process_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request has a new process."""
    with process(tmp_path, monkeypatch, FAULTS[name]) as compiling:
        with pytest.raises(
            RequestError,
            match=r"its regex cannot be compiled: (the process|it takes)",
        ) as error:
            compiling.lark(StructuredOutputsParams(regex="fault", field_name="guided_regex"), "fault")
        assert error.value.param == "guided_regex"
        for _ in range(2):
            assert compiling.lark(StructuredOutputsParams(regex="ok"), "ok") == "ok"


def test_a_compiling_process_that_cannot_start_is_the_servers_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(grammar_process, "_WORKER", script)
    compiling = GrammarProcess(16, {0: b"<end>"}, [0], None)
    compiling.start()
    with pytest.raises(MachineError, match="cannot start") as error:
        compiling.lark(StructuredOutputsParams(regex="ok"), "ok")
    assert problem_of(error.value, accepting=True).status == problem_of(error.value, accepting=False).status == 503


def test_an_answer_without_memory_for_its_lexer_ends_alone(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other answers of the step get their masks."""
    (lost,) = grammars.matchers(StructuredOutputsParams(regex="a+"), 1)
    (other,) = grammars.matchers(StructuredOutputsParams(regex="(?s:.)+"), 1)
    lost.guide.consume_token(VOCABULARY + 10**6)  # an error of the matcher, as its lexer's limit is
    assert lost.error
    expected = grammars.masks([other])[0]
    monkeypatch.setattr(grammars, "_lexer_failures", lambda matchers: [0])

    def no_thread(work: object) -> None:
        raise MachineError("no memory is left", "memory", "try again")

    monkeypatch.setattr("millrace.runtime.structured_output.grammar.in_deep_stack", no_thread)
    masks = grammars.masks([lost, other])
    assert not masks[0].any() and (masks[1] == expected).all() and expected.any()
    assert lost.error == "no memory is left" and lost.fault is None and not other.error


def test_a_short_form_waits_for_no_long_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "import time; time.sleep(600)"
    with process(tmp_path, monkeypatch, fault) as compiling:
        long = StructuredOutputsParams(regex="x" * 20_000)
        failed: list[RequestError] = []

        def wait() -> None:
            try:
                compiling.lark(long, "fault")
            except RequestError as error:
                failed.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        deadline = time.monotonic() + 60
        while compiling._long.worker._at_work is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert compiling._long.worker._at_work is not None
        assert compiling.lark(StructuredOutputsParams(regex="short"), "short") == "short"
        assert waiting.is_alive()
        compiling._long.worker._at_work.kill()
        waiting.join(60)
    assert len(failed) == 1


def test_only_texts_of_a_few_kilobytes_are_short() -> None:
    schemas = {f"k{i}": {"type": "string", "enum": ["a", "b"]} for i in range(40)}
    assert StructuredOutputsParams(json={"properties": schemas}).is_short
    for form in (
        {"json": json.dumps(keys(600)["json"])},
        {"choice": ["word"] * 5000},
        keys(900),
        {"regex": "a" * 9000},
    ):
        assert not StructuredOutputsParams(**form).is_short
    assert StructuredOutputsParams(json_object=True).is_short and StructuredOutputsParams(choice=["a", "b"]).is_short


def test_the_thread_that_compiles_has_the_larger_stack() -> None:
    """Python's own limit would be reached before: what C uses of the stack is asked of it."""
    sizes: list[int] = []
    before = threading.stack_size()

    def measure() -> str:
        from ctypes import CDLL, byref, c_size_t, c_ulong, create_string_buffer

        libc = CDLL(None)
        attributes, size = create_string_buffer(256), c_size_t()
        libc.pthread_self.restype = c_ulong
        assert not libc.pthread_getattr_np(c_ulong(libc.pthread_self()), attributes)
        assert not libc.pthread_attr_getstacksize(attributes, byref(size))
        sizes.append(size.value)
        return "measured"

    assert in_deep_stack(measure) == "measured" and threading.stack_size() == before
    assert sizes[0] >= 2 * grammar_worker.STACK_BYTES
    with pytest.raises(ZeroDivisionError):
        in_deep_stack(lambda: 1 // 0)
