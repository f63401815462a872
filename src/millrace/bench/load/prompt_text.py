"""Prompts of a given token length without the model's tokenizer, from common words and a fitted tokens-per-word
ratio."""

import random
from dataclasses import dataclass

_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could people my
than first water been call who oil its now find long down day did get come made may part over new sound take only
little work know place year live me back give most very after thing our just name good sentence man think say great
where help through much before line right too mean old any same tell boy follow came want show also around form
three small set put end does another well large must big even such because turn here why ask went men read need land
different home us move try kind hand picture again change off play spell air away animal house point page letter
mother answer found study still learn should world high every near add food between own below country plant last
school father keep tree never start city earth eye light thought head under story saw left few while along might
close something seem next hard open example begin life always those both paper together got group often run
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class PromptWords:
    """Token count of a text of words: `overhead` (chat template) plus `tokens_per_word` for each word."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> "PromptWords":
        """Fit to two prompts, each (words, tokens reported by the server)."""
        slope = (many[1] - few[1]) / (many[0] - few[0])
        if slope <= 0:  # the server reports no lengths, or truncates
            return cls()
        return cls(slope, max(0.0, few[1] - slope * few[0]))

    def text(self, n_tokens: float, rng: random.Random, fresh: bool = True) -> str:
        """Generate a text of about n tokens, at least one word. fresh: a new prompt, whose template tokens count"""
        n_words = (n_tokens - (self.overhead if fresh else 0.0)) / self.tokens_per_word
        return " ".join(rng.choices(WORDS, k=max(1, round(n_words))))
