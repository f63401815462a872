"""A tokenizer for random weights."""

from millrace.checkpoint.tokenizer.tokenizer import SpecialTokens, Tokenizer


class Words(Tokenizer):
    """Any token is a word: nothing is encoded here, and a stream needs text."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, SpecialTokens(named={}, bos_token_id=None, eos_token_id=None, ids=frozenset()))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError("prompts are token ids")

    def _token_bytes(self, token_id: int) -> bytes:
        return b"word "

    def _first_bytes(self, token_id: int) -> bytes:
        return b"word "
