"""How good an engine's answers are: perplexity of a text, and how far its distributions are from another engine's."""
