"""Formats of tool calls and reasoning: for prompts, answer parsers and grammars."""
