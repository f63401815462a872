"""A tokenizer with transformers' interface, as returned by `LLM.get_tokenizer()` in vLLM, too.

Arguments, defaults and results are those of transformers 5. Anything unsupported is refused with an alternative: an
AttributeError for a name, a RequestError for an argument.
"""

from collections.abc import Mapping, Sequence
from typing import Any, overload

from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.tokenizer.tokenizer import NAMED_TOKENS, VocabularyTokenizer
from millrace.errors import CheckpointError, ConfigError, RequestError, nearest, sanitize

Message = Mapping[str, object]
# Arguments of transformers, the values that match the actual behavior, and what to use for other values.
_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "padding": ((False, None), "generate() takes prompts of any lengths"),
    "truncation": ((False, None), "shorten the list of ids"),
    "max_length": ((None,), "shorten the list of ids"),
    "return_tensors": ((None,), "numpy.array or torch.tensor makes one of the ids"),
    "text_pair": ((None,), "encode each text"),
    "stride": ((0,), "cut the list of ids"),
    "return_token_type_ids": ((False, None), "they are all 0"),
    "return_attention_mask": ((True, None), "take input_ids alone"),
    "clean_up_tokenization_spaces": ((False, None), "the text is given as it is"),
    "chat_template": ((None,), "put it into the checkpoint as chat_template.jinja"),
    "documents": ((None,), "put them into a message"),
    "continue_final_message": ((False,), "render with tokenize=False and add the beginning to the text"),
    "return_assistant_tokens_mask": ((False,), "encode the messages one by one"),
    "tokenizer_kwargs": ((None,), "render with tokenize=False, then encode"),
}
_ELSEWHERE = "transformers.AutoTokenizer.from_pretrained(FOLDER) reads the same files"


class Encoding(dict[str, Any]):
    """Has `encoding.input_ids` and `encoding["input_ids"]`; the mask is all ones, because nothing is padded."""

    input_ids: list[Any]
    attention_mask: list[Any]

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"an encoding has no {name}; it has {' and '.join(self)}")


class HfTokenizer:
    """Special tokens are attributes: `bos_token`, `eos_token_id`, ...; None if the model has no such token."""

    def __init__(self, tokenizer: VocabularyTokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template

    def __getattr__(self, name: str) -> Any:
        if name in NAMED_TOKENS:
            return self._tokenizer.special_token_strings.get(name)
        if name.removesuffix("_id") in NAMED_TOKENS:
            token = self._tokenizer.special_token_strings.get(name.removesuffix("_id"))
            return None if token is None else self._tokenizer.token_id(token)
        if name.startswith("_"):  # not a mistake of the user: copy and pickle look up such names
            raise AttributeError(name)
        attributes = [n for n in dir(type(self)) if not n.startswith("_")]
        attributes += [f"{token}{end}" for token in NAMED_TOKENS for end in ("", "_id")]
        raise AttributeError(f"this tokenizer has no {sanitize(name)} ({nearest(name, attributes)}); {_ELSEWHERE}")

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "a tokenizer of an LLM cannot be pickled: it holds processes of this one",
            "the name of the model",
            f"send the name, and ask for the tokenizer there; {_ELSEWHERE}",
        )

    def __copy__(self) -> "HfTokenizer":
        return self  # immutable

    def __deepcopy__(self, memo: object) -> "HfTokenizer":
        return self

    def __len__(self) -> int:
        """Return the number of tokens, including added ones."""
        return self._tokenizer.n_tokens

    @property
    def vocab_size(self) -> int:
        """Return the number of trained tokens."""
        return self._tokenizer.n_trained

    @property
    def chat_template(self) -> str | None:
        """Return the template's Jinja2 source, or None."""
        return None if self._template is None else self._template.source

    def get_vocab(self) -> dict[str, int]:
        tokens = ((self._tokenizer.token(i), i) for i in sorted(self._tokenizer.ids()))
        return {token: i for token, i in tokens if token is not None}

    def __call__(
        self, text: str | Sequence[str], text_pair: None = None, *, add_special_tokens: bool = True, **options: Any
    ) -> Encoding:
        """Return token ids and mask of a text, or lists of them for several texts. raises RequestError"""
        _check({"text_pair": text_pair, **options})
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        if not _is_list(text):
            raise RequestError(f"the text is of type {type(text).__name__}", "a text, or a list of texts", "give that")
        each = [self.encode(one, add_special_tokens=add_special_tokens) for one in text]
        return Encoding(input_ids=each, attention_mask=[[1] * len(ids) for ids in each])

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Return the token ids of a text. raises RequestError if it is not a string"""
        _check(options)
        _check_flag("add_special_tokens", add_special_tokens)
        if not isinstance(text, str):
            raise RequestError(f"the text is of type {type(text).__name__}", "a text", "encode each text of a list")
        return self._tokenizer.encode(text, add_special_tokens)

    def tokenize(self, text: str, add_special_tokens: bool = False, **options: Any) -> list[str | None]:
        """Return tokens as in the vocabulary, by default without special tokens."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens, **options))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of an id or a list (also an array or tensor); a list of texts for a list of lists.

        An id without a token has no text. raises RequestError if a value is not an id
        """
        _check(options)
        _check_flag("skip_special_tokens", skip_special_tokens)
        ids = _ids(token_ids, depth=2)
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return [self._tokenizer.decode(one, skip_special_tokens) for one in ids]
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        """Like `decode`, but always return a list; empty for no sequences (transformers since 5.24)."""
        ids = _ids(sequences, depth=2)
        result = self.decode(ids, skip_special_tokens, **options)
        return result if isinstance(result, list) else [result] if ids != [] else []

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> str | list[str | None] | None:
        """Return tokens as in the vocabulary; None for an id without a token. raises RequestError if it is not an id"""
        _check_flag("skip_special_tokens", skip_special_tokens)
        ids = _ids(ids, depth=1)
        if isinstance(ids, int):
            return self._tokenizer.token(ids)
        skipped = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        return [self._tokenizer.token(i) for i in ids if i not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return ids; an unknown token has `unk_token_id`, or None if the model has none."""
        if isinstance(tokens, str):
            result = self._tokenizer.token_id(tokens)
            return self.unk_token_id if result is None else result
        if not _is_list(tokens):
            raise RequestError(f"a token is of type {type(tokens).__name__}", "a token as text, or a list", "give that")
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """Return the prompt of a conversation, or a list for several: text, or with `tokenize` its encoding.

        return_dict: False for token ids only (as in transformers 4). options: variables of the template
        raises CheckpointError if the model has no template, RequestError if it refuses the messages
        """
        if self._template is None:
            raise CheckpointError("this model has no chat template", "a chat model", "write the prompt yourself")
        extra = {name: value for name, value in options.items() if name not in _NEUTRAL}
        _check({name: value for name, value in options.items() if name in _NEUTRAL})
        if "messages" in extra:
            raise RequestError("messages are given twice", "the conversation alone", "leave out messages=")
        if tools is not None:
            extra["tools"] = _tools(tools)
        several = _is_list(conversation) and bool(conversation) and _is_list(conversation[0])
        conversations: Any = conversation if several else [conversation]
        for one in conversations:
            if not _is_list(one):
                what = f"a conversation is of type {type(one).__name__}"
                raise RequestError(what, "a list of messages", 'give [{"role": "user", "content": "..."}]')
        texts = [
            self._template.render(c, add_generation_prompt=add_generation_prompt, extra=extra) for c in conversations
        ]
        ids: Any = texts if several else texts[0]
        if not tokenize:
            return ids
        encoding = self(ids, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids


def _is_list(ids: object) -> bool:
    return isinstance(ids, Sequence) and not isinstance(ids, str | bytes)


def _ids(ids: Any, depth: int) -> Any:
    """Convert ids to ints, or lists of ints nested up to `depth`; also from arrays and tensors.

    raises RequestError for anything else
    """
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, int) and not isinstance(ids, bool) and ids >= 0:
        return ids
    if depth and _is_list(ids):
        result = [_ids(one, depth - 1) for one in ids]
        if len({type(one) for one in result}) <= 1:
            return result
        raise RequestError("the list has ids and lists of ids", "one or the other", "decode each by itself")
    what = f"a token id is {ids!r}" if isinstance(ids, int | float) else f"ids are of type {type(ids).__name__}"
    raise RequestError(what, "whole numbers from 0, or lists of them", "give what encode() gives, or its input_ids")


def _tools(tools: Any) -> list[Any]:
    """Return the tools. raises RequestError if they are not a list of descriptions"""
    wrong = next((t for t in tools if not isinstance(t, Mapping)), None) if _is_list(tools) else tools
    if wrong is not None:
        what = f"tools {'has' if _is_list(tools) else 'is'} a {type(wrong).__name__}"
        fix = "describe each function; transformers.utils.get_json_schema(function) does it"
        raise RequestError(what, "a list of JSON schemas", fix)
    return list(tools)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}", "True or False", "give texts and ids one by one, options by name")


def _check(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if name not in _NEUTRAL:
            raise RequestError(f"there is no argument {name}", nearest(name, _NEUTRAL), "correct it, or leave it out")
        neutral, instead = _NEUTRAL[name]
        if not any(value is v or (type(value) is type(v) and value == v) for v in neutral):
            raise RequestError(f"{name} is {value!r}", " or ".join(map(repr, neutral)), f"leave it out: {instead}")
