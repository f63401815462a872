"""Contents and turns that a template cannot render reach it in a form that it can; the truth is transformers."""

import json
from collections.abc import Callable
from typing import Any

import jinja2
import pytest

from millrace.checkpoint.chat.chat_prompt import PromptRenderer
from millrace.checkpoint.chat.chat_template import ChatTemplate, normalised
from millrace.checkpoint.chat.chat_worker import Renderer
from millrace.checkpoint.chat.chat_worker import _answer as answer
from millrace.errors import RequestError
from tests.checkpoint.tool_calls.test_published_templates import FAMILIES
from tests.support.vocabularies import CHATML, save_byte_fallback

Messages = list[dict[str, Any]]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
Theirs = Callable[..., str]
PARTS = [{"type": "text", "text": "12 C"}, {"type": "text", "text": "rain"}]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
]  # fmt: skip


def call(arguments: object = "{}") -> dict[str, object]:
    return {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}


def agent(content: object, *, result: object = "12", arguments: object = "{}") -> Messages:
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "call00001", "content": result},
    ]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    import transformers

    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_fallback(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def render(source: str, messages: Messages, **options: Any) -> str:
        text = tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True, **options
        )
        assert isinstance(text, str)
        return text

    return render


class InThisProcess(ChatTemplate):
    """Renders as the worker does, without starting one."""

    def _exchange(self, request: dict[str, object]) -> dict[str, object]:
        asked = json.loads(json.dumps(request))
        try:
            renderer = Renderer(self.sources[asked["template"]], dict(self._variables))
        except jinja2.TemplateError as error:
            return {"error": "template", "what": str(error)}
        return answer(renderer, asked)


def ours(source: str | dict[str, str], messages: Messages, tools: Any = (), **options: Any) -> str:
    return PromptRenderer(InThisProcess(source, SPECIALS)).render(normalised(messages), tools, **options)


def turn(content: str) -> str:
    """A template with calls, and this expression for contents."""
    return (
        "{% for m in messages %}<|{{ m.role }}|>"
        + content
        + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
        "{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    )


NULL = {
    "in": turn(
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    ),
    "print": turn("{{ m.content }}"),
    "trim": turn("{{ m.content | trim }}"),
    "add": turn("{{ m.content + '' }}"),
    "split": turn("{{ m['content'].split('x') | join('x') }}"),
    "format": turn("{{ '%s' % m.content }}"),
    "string": turn("{{ m.content | string }}"),
}  # fmt: skip


@pytest.mark.parametrize("source", NULL.values(), ids=NULL)
@pytest.mark.parametrize(
    "of", ["null", "absent", *(pytest.param(of, marks=pytest.mark.nightly) for of in ("empty", "no parts"))]
)
def test_a_call_without_text_renders_as_one_with_an_empty_text(theirs: Theirs, source: str, of: str) -> None:
    messages = agent({"null": None, "absent": None, "empty": "", "no parts": []}[of])
    if of == "absent":
        del messages[1]["content"]
    assert ours(source, messages, TOOLS) == theirs(source, agent("", arguments={}), tools=TOOLS)


def test_null_is_passed_on_as_transformers_does_unless_calls_get_lost(theirs: Theirs) -> None:
    """A template that writes calls beside null alone is given null, also in place of an empty text."""
    asks = turn("{% if m.content is defined %}{{ m.content }}{% else %}(nothing){% endif %}")
    assert ours(asks, agent(None), TOOLS) == theirs(asks, agent(None, arguments={}), tools=TOOLS)
    needs = turn("").replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])")
    for content in (None, ""):
        assert '<tool_call>{"name": "f"' in ours(needs, agent(content), TOOLS)


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_null_is_an_empty_text_for_every_role(theirs: Theirs, role: str) -> None:
    source, message = turn("{{ m.content }}"), {"role": role}
    messages: Messages = [{**message, "content": None}, {"role": "user", "content": "x"}]
    empty: Messages = [{**message, "content": ""}, {"role": "user", "content": "x"}]
    assert ours(source, messages) == theirs(source, empty)


PARTS_OR_TEXT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}"
)
PER_ROLE = turn(
    "{% if m.role == 'tool' %}[R]{{ m.content | string }}[/R]{% else %}" + PARTS_OR_TEXT + "{% endif %}{% endif %}"
)


def test_lists_are_passed_on_where_they_render_and_joined_elsewhere(theirs: Theirs) -> None:
    messages = agent("", result=PARTS)
    messages[0]["content"] = PARTS
    text = ours(PER_ROLE, messages, TOOLS)
    joined = agent("", result="12 C\nrain", arguments={})
    joined[0]["content"] = PARTS
    assert text == theirs(PER_ROLE, joined, tools=TOOLS)
    assert "(12 C)(rain)" in text and "[R]12 C\nrain[/R]" in text


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}", "{{ m.content | string }}", "{{ m.content | tojson }}", "{{ m.content + '' }}",
        "{% if m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}",
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
        "{% if m.content is string %}{{ m.content }}{% endif %}",
        '{{ {"content": m.content | tojson} | tojson }}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_lists_that_do_not_render_are_joined(theirs: Theirs, content: str, role: str) -> None:
    """Python's and JSON's spelling of a list, the first part alone, nothing at all, an error."""
    source = "{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}"
    more = [{"role": "user", "content": "x"}] if role == "system" else []
    expected = theirs(source, [{"role": role, "content": "12 C\nrain"}, *more])
    assert ours(source, [{"role": role, "content": PARTS}, *more]) == expected


def test_a_text_becomes_a_list_for_templates_that_read_lists_alone(theirs: Theirs) -> None:
    for source in (
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}",
    ):
        expected = theirs(source, [{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
        assert ours(source, [{"role": "user", "content": "hello"}]) == expected and "hello" in expected


GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content | trim }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [GEMMA, DROPS], ids=["refuses", "drops"])
def test_tools_are_told_by_the_user_if_the_template_renders_no_system_message(source: str) -> None:
    plain: Messages = [{"role": "user", "content": "hi"}]
    assert ours(source, plain) == ours(source, plain, ())
    first = ours(source, plain, TOOLS)
    assert '"name": "f"' in first.partition("hi")[0] and first.count("<|user|>") == 1
    turns: Messages = [
        *agent(None), {"role": "assistant", "content": "It is 12."}, {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": None, "tool_calls": [call(), call('{"a": 1}')]},
        {"role": "tool", "tool_call_id": "call00001", "content": PARTS},
        {"role": "tool", "tool_call_id": "call00001", "content": "13"},
        {"role": "user", "content": "Be brief."},
    ]  # fmt: skip
    whole = ours(source, turns, TOOLS)
    assert whole.startswith(first.removesuffix("<|assistant|>")), "signatures stay in the first message"
    assert whole.count("You can call functions") == 1 and "12 C\nrain" in whole
    assert whole.rindex("13") < whole.index("Be brief.")


@pytest.mark.parametrize("source", [GEMMA, DROPS], ids=["refuses", "drops"])
def test_the_clients_own_system_message_joins_the_first_of_the_user(theirs: Theirs, source: str) -> None:
    messages: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    joined: Messages = [{"role": "user", "content": "Be brief.\n\nhi"}]
    assert ours(source, messages) == theirs(source, joined)
    assert "Be brief." in ours(source, messages, TOOLS)
    alone: Messages = [{"role": "system", "content": "Be brief."}]
    assert ours(source, alone) == theirs(source, [{"role": "user", "content": "Be brief."}])


def test_what_no_merging_fixes_is_refused_in_the_templates_words() -> None:
    """And ChatTemplate alone, behind apply_chat_template, refuses what transformers does."""
    with pytest.raises(RequestError, match="roles must alternate"):
        ours(GEMMA, [{"role": "assistant", "content": "a"}])
    messages: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="System role not supported"):
        InThisProcess(GEMMA, SPECIALS).render(messages)


def test_turns_are_merged_for_templates_whose_turns_must_alternate(theirs: Theirs) -> None:
    messages: Messages = [
        {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"}, {"role": "user", "content": PARTS}, {"role": "assistant", "content": "b"},
        {"role": "system", "content": "Now in French."}, {"role": "user", "content": "c"},
    ]  # fmt: skip
    text = ours(GEMMA, messages)
    first = "Be brief.\n\nBe kind.\n\na\n\n12 C\nrain"
    assert text == f"<s><|user|>{first}<|end|><|assistant|>b<|end|><|user|>Now in French.\n\nc<|end|><|assistant|>"
    as_sent: Messages = [m if m["content"] is not PARTS else {**m, "content": "12 C\nrain"} for m in messages]
    assert ours(CHATML, messages) == theirs(CHATML, as_sent), "only for templates that refuse them"


MISTRAL = """{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endif %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}</s>{% endif %}
{%- endfor %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"""


def test_what_a_user_says_right_after_a_result_joins_it_where_turns_alternate() -> None:
    messages = [*agent(None), {"role": "user", "content": "Go on."}]
    text = ours(MISTRAL, messages, TOOLS)
    assert "[TOOL_RESULTS]12\n\nGo on.[/TOOL_RESULTS]" in text


DEFAULT = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TOOL_USE = "{{ bos_token }}TOOLS {% for t in tools %}{{ t | tojson }}{% endfor %}" + DEFAULT.removeprefix(
    "{{ bos_token }}"
)


def test_the_template_for_tools_is_taken_if_there_are_tools(theirs: Theirs) -> None:
    messages: Messages = [{"role": "user", "content": "hi"}]
    templates = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": "RAG"}
    assert ours(templates, messages, TOOLS) == theirs(TOOL_USE, messages, tools=TOOLS)
    assert ours(templates, messages) == theirs(DEFAULT, messages)
    whole = ours(templates, agent(None), TOOLS)
    assert '"name": "f", "arguments": {}' in whole and "None" not in whole, "calls that it does not write are in words"
    broken = {"default": DEFAULT, "tool_use": "{% for t in tools %}"}
    assert ours(broken, messages) == theirs(DEFAULT, messages)
    native = {"default": DEFAULT, "tool_use": turn("{{ m.content }}")}
    assert ours(native, agent(None), TOOLS) == theirs(native["tool_use"], agent("", arguments={}), tools=TOOLS)


def test_a_template_for_tools_that_writes_calls_in_its_own_way_is_given_them(theirs: Theirs) -> None:
    own = TOOL_USE.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}"
        "{% endfor %}",
    )
    messages = agent("I look.", arguments='{"a": "é"}')
    expected = theirs(own, agent("I look.", arguments={"a": "é"}), tools=TOOLS)
    assert ours({"default": DEFAULT, "tool_use": own}, messages, TOOLS) == expected


def test_arguments_may_be_objects_in_python() -> None:
    source = turn("{{ m.content }}")
    assert ours(source, agent(None, arguments={"a": "é"})) == ours(source, agent(None, arguments='{"a": "é"}'))


def test_probes_are_few_and_bounded() -> None:
    """In a process of its own. A template that prints much at a probe is no trouble; what is known is kept."""
    much = "{% for i in range(99999) %}" + "x" * 99 + "{% endfor %}"
    source = "{% if messages[0].content == 'hi' %}{{ messages[0].content }}{% else %}" + much + "{% endif %}"
    template = ChatTemplate({"default": source, "tool_use": PER_ROLE}, SPECIALS)
    try:
        assert template.render([{"role": "user", "content": "hi"}]) == "hi"
        prompts = PromptRenderer(template)
        texts = {prompts.render(normalised(agent(content, result=PARTS)), TOOLS) for content in (None, "", None)}
        assert len(texts) == 1 and "[R]12 C\nrain[/R]" in texts.pop()
        assert template.renders_tools() == (True, True)
    finally:
        template.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_templates_render_every_form_of_an_agents_turns_alike(family: str) -> None:
    """Null, absent and empty contents of a call; results as a text or in parts; calls alone and with what follows."""
    template = InThisProcess(FAMILIES[family].template, SPECIALS)
    prompts, rendered = PromptRenderer(template), set[str]()
    contents: list[Any] = [None, "absent", "", []]
    for content in contents:
        for result in ("12 C\nrain", PARTS):
            messages = agent(content, result=result)
            messages[1]["tool_calls"] = [{**call(), "id": "abcdefgh0"}]
            if content == "absent":
                del messages[1]["content"]
            whole = [*messages, {"role": "assistant", "content": "Done."}, {"role": "user", "content": PARTS}]
            rendered.add(prompts.render(normalised(messages), TOOLS) + "|" + prompts.render(normalised(whole), TOOLS))
    (text,) = rendered
    assert "None" not in text and "'text'" not in text and text.count("rain") == 3
