"""How models write calls of tools, and thoughts: for prompts, for the readers of answers, for grammars."""
