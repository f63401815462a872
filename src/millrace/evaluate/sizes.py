"""Sizes and names that `--help` of `eval` shows; no imports."""

LENGTH = 512  # tokens of a window: llama-perplexity's default, used for its published figures
SHORTEST = 16  # tokens of a window: with fewer, predictions have almost no context
FILE = "FILE.jsonl"  # as a task: the user's questions
MAX_SHOTS = 5  # MMLU's dev/ has five examples per subject
