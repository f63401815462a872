"""Chat templates: the same text as transformers, and templates that loop, swallow memory, break or try to break out."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from millrace.checkpoint.chat import chat_template
from millrace.checkpoint.chat.chat_template import ChatLimits, ChatTemplate, normalised
from millrace.errors import CheckpointError, RequestError
from millrace.machine.worker_process import FrameProcess, WorkerDiedError, WorkerProcess
from tests.support.vocabularies import CHATML, INSTRUCT, save_byte_fallback

WORKER = Path(chat_template.__file__).with_name("chat_worker.py")
Messages = list[dict[str, object]]
TALK: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'What is "7 * 6" <b>?\n'},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "Danke, schön 😀"},
]
# Idioms of published templates: namespaces, loop controls, tojson, dates, generation blocks, white space control.
IDIOMS = """{%- set ns = namespace(system='', n=0) -%}
{%- for m in messages if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endfor -%}
{{- bos_token + '[S]' + ns.system + '[/S]' -}}
{%- if tools is defined and tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- if ns.n > 3 %}{% break %}{% endif %}
    {%- if m.role == 'assistant' %}
        {%- generation %}
{{ m.content }}{{ eos_token }}
        {%- endgeneration %}
    {%- else %}
<|{{ m.role | upper }}|> {{ m.content.strip().split('?')[0] | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}
<think>
{%- endif %}"""
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def render(source: str, messages: Messages, limits: ChatLimits | None = None, **extra: object) -> str:
    template = ChatTemplate(source, SPECIALS, limits)
    try:
        return template.render(messages, extra=extra)
    finally:
        template.close()


@pytest.mark.parametrize("source", [CHATML, INSTRUCT, IDIOMS], ids=["chatml", "instruct", "idioms"])
def test_the_text_is_that_of_transformers(tmp_path: Path, source: str) -> None:
    import transformers

    save_byte_fallback(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = ChatTemplate(source, SPECIALS)
    options: list[Mapping[str, object]] = [{}, {"enable_thinking": False}, {"tools": [{"name": "añb", "x": [1, None]}]}]
    for n in range(1, len(TALK) + 1):
        for extra in options:
            for prompt in (True, False):
                expected = theirs.apply_chat_template(
                    TALK[:n], chat_template=source, tokenize=False, add_generation_prompt=prompt, **extra
                )
                assert ours.render(TALK[:n], add_generation_prompt=prompt, extra=extra) == expected
    ours.close()


def test_none_is_left_out_and_dates_work() -> None:
    message: dict[str, object] = {"role": "assistant", "content": "x", "tool_calls": None}
    assert render("{{ messages[0].tool_calls is defined }}", [message]) == "False"
    assert render("{{ strftime_now('%Y') }}", TALK).isdecimal()


def test_text_parts() -> None:
    parts: Messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(CHATML, parts).startswith("<|im_start|>user\na\nb<|im_end|>")
    loops = "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert render(loops, parts) == "[a][b]"
    named = "{% set content = messages[0].content %}{% for p in content %}({{ p.text }}){% endfor %}"
    assert render(named, parts) == "(a)(b)"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"content": "hello"}],
        [{"role": 3, "content": "hello"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["hello"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "extra": object()}],
    ],
)
def test_wrong_messages_never_reach_the_template(messages: Messages) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate("", {}).render(messages)
    assert caught.value.param == "messages"


def test_messages_of_openai_s_clients_become_those_that_templates_know() -> None:
    parts = [{"type": "text", "text": "a"}]
    asked: Messages = [
        {"role": "developer", "content": "a", "name": None},
        {"role": "user", "content": parts, "name": "b"},
    ]
    as_sent = json.dumps(asked)
    assert normalised(asked) == [{"role": "system", "content": "a"}, {"role": "user", "content": parts, "name": "b"}]
    assert json.dumps(asked) == as_sent, "the caller's own are left as they are"
    nothing: Messages = [{"role": "user", "content": None}, {"role": "assistant"}, {"role": "tool", "content": None}]
    assert [message.get("content") for message in normalised(nothing)] == [None] * 3
    calls = [{"function": {"arguments": "{}"}}]
    for wrong in (
        {"role": "user"}, {"role": "system"}, {"role": "user", "content": 1}, {"content": ""},
        {"role": "assistant", "tool_calls": calls}, {"role": "assistant", "tool_calls": 5},
    ):  # fmt: skip
        with pytest.raises(RequestError, match=r"messages\[1\]") as caught:
            normalised([asked[0], wrong])
        assert caught.value.param == "messages"


def test_a_template_can_refuse() -> None:
    with pytest.raises(RequestError, match="system must come first") as caught:
        render(INSTRUCT, [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
    assert caught.value.param == "messages"


def test_messages_that_only_this_template_cannot_render() -> None:
    """A template that renders a greeting is not broken: the messages are what it refuses."""
    message: dict[str, object] = {"role": "user", "content": "", "name": 5}
    with pytest.raises(RequestError, match="refuses"):
        render("{% for m in messages %}{{ m['content'] + (m.name or '') }}{% endfor %}", [message])


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% for m in messages %}", "line 1"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{% generation %}", "broken"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{% include 'x' %}", "broken"),
        ("{% set x = [] %}{{ x.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.__init__.__globals__ }}", "SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_broken_and_hostile_templates(source: str, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        render(source, TALK)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_loops_is_stopped_and_the_next_request_is_served() -> None:
    source = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}done"
    template = ChatTemplate(source, {}, ChatLimits(timeout_s=0.5))
    assert template.render(TALK) == "done"
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="loop for ever"):
        template.render([{"role": "user", "content": "loop"}])
    assert time.monotonic() - began < 3
    assert template.render(TALK) == "done"
    template.close()
    assert template.render(TALK) == "done", "closed is not the end"
    template.close()


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{{ 'a' * (2 ** 31) }}",
        "{{ ' ' * 99999999999 }}",
        "{{ '%1000000000d' % 1 }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ range(99999999999) | list }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_that_grows_is_stopped(source: str) -> None:
    limits = ChatLimits(timeout_s=1.0, memory_bytes=200 * 2**20, max_characters=10**6)
    with pytest.raises(CheckpointError, match=r"limits|loop|memory|OverflowError|broken"):
        render(source, TALK, limits)


def test_threads_take_turns() -> None:
    template = ChatTemplate(CHATML, SPECIALS)
    got: dict[int, str] = {}

    def work(i: int) -> None:
        got[i] = template.render([{"role": "user", "content": f"number {i}"}])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    template.close()
    assert all(f"number {i}<" in got[i] for i in range(16))


def test_long_conversations_and_surrogates_pass_through() -> None:
    long = "é😀\ud800" * 200_000
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": long}]) == long
    template.close()


def test_the_process_ends_with_its_owner() -> None:
    template = ChatTemplate(CHATML, {})
    template.render(TALK)
    assert template._worker.process is not None
    process = template._worker.process.process
    assert process.poll() is None
    del template
    assert process.poll() is not None


def test_a_killed_process_is_replaced() -> None:
    template = ChatTemplate(CHATML, {})
    expected = template.render(TALK)
    assert template._worker.process is not None
    template._worker.process.process.kill()
    template._worker.process.process.wait()
    assert template.render(TALK) == expected
    template.close()


def test_one_that_ended_unnoticed_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end after somebody looked whether it runs, milliseconds before it is asked: nobody's messages did that."""
    monkeypatch.setattr(FrameProcess, "alive", property(lambda self: self.close.alive))
    template = ChatTemplate("done", {})
    assert template.render(TALK) == "done"
    first = template._worker.process
    assert first is not None
    first.process.kill()
    first.process.wait()
    assert template.render(TALK) == "done"
    assert template._worker.process is not first
    template.close()


def test_what_ends_a_new_process_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FrameProcess] = []

    def exchange(process: FrameProcess, payload: bytes, timeout_s: float) -> bytes:
        process.process.kill()
        raise WorkerDiedError(-9)

    worker = WorkerProcess(WORKER, started.append)
    monkeypatch.setattr(FrameProcess, "exchange", exchange)
    for n in (1, 2):
        with pytest.raises(WorkerDiedError):
            worker.exchange(b"", 1)
        assert len(started) == n
        worker.stop()


def test_a_process_whose_owner_was_killed_ends_by_itself() -> None:
    """Nobody is left to kill it when the server itself was killed in the middle of a template that loops."""
    request: dict[str, object] = {
        "template": "default", "messages": TALK, "add_generation_prompt": True, "extra": {}, "timeout_s": 0.1,
        "max_characters": 9, "preamble": "", "merges": False,
    }  # fmt: skip
    load: dict[str, object] = {"templates": {"default": LOOP}, "first": "default", "variables": {}}
    frames: list[dict[str, object]] = [{"memory_bytes": 2**29}, load, request]
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-P", str(WORKER)], stdin=theirs.fileno()) as process:
        theirs.close()
        with Connection(ours.detach()) as owner:
            for frame in frames:
                owner.send_bytes(json.dumps(frame).encode())
            assert owner.recv_bytes() == owner.recv_bytes() == b'{"ready": true}'
        assert process.wait(20) == -signal.SIGALRM


@pytest.mark.parametrize("max_s", [3, pytest.param(0.5, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_it_is_closed_in_the_middle_of_a_rendering(max_s: float) -> None:
    """Whoever closes it, the server's event loop for one, does not wait for the rendering."""
    template = ChatTemplate("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}done", {})
    assert template.render(TALK) == "done"
    with ThreadPoolExecutor(1) as threads:
        rendering = threads.submit(template.render, [{"role": "user", "content": "loop"}])
        time.sleep(0.2)
        start_s = time.monotonic()
        template.close()
        assert time.monotonic() - start_s < max_s
        with pytest.raises(CheckpointError, match="ended"):
            rendering.result(2)
    assert template.render(TALK) == "done", "closed is not the end"
    template.close()


def test_processes_end_with_a_server_that_is_killed() -> None:
    """Both kinds: each reads the end of its connection, and no process holds that of another open."""
    code = (
        "import os, sys; sys.path[:0] = ['src'];"
        "from millrace.checkpoint.chat.chat_template import ChatTemplate;"
        "from millrace.checkpoint.tokenizer.tokenizer_process import TokenizerProcess;"
        "from millrace.compile.resolve_model import BUNDLED;"
        "chats = [ChatTemplate('x', {}) for _ in range(2)]; [c.render([{'role': 'user'}]) for c in chats];"
        "text = TokenizerProcess(BUNDLED / 'tiny'); text.encode('Once', True);"
        "print(*(one._worker.process.process.pid for one in (*chats, text)), flush=True); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 3, done.stderr
    until_s = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_without_a_standard_input() -> None:
    """A server may be started with its standard streams closed: then the connection gets their numbers."""
    code = (
        "import os, sys; sys.path[:0] = ['src']; os.close(0); os.close(1);"
        "from millrace.checkpoint.chat.chat_template import ChatTemplate;"
        "from millrace.checkpoint.tokenizer.tokenizer_process import TokenizerProcess;"
        "from millrace.compile.resolve_model import BUNDLED;"
        "text = ChatTemplate('{{ messages[0].content }}', {}).render([{'role': 'user', 'content': 'x'}]);"
        "ids = TokenizerProcess(BUNDLED / 'tiny').encode('Once', True);"
        "os._exit(0 if text == 'x' and len(ids) > 1 else 1)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_worker_imports_little() -> None:
    """It starts with the first chat request, so its start is part of somebody's wait."""
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='worker');"
        "heavy = {'numpy', 'torch', 'transformers', 'tokenizers', 'asyncio', 'millrace'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy - {'asyncio'} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(WORKER)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
