"""What `--help` tells of evaluating: sizes and names, no imports."""

LENGTH = 512  # tokens of a window: llama-perplexity's, and where its published figures are from
SHORTEST = 16  # tokens of a window: with fewer, predictions have no context to speak of
FILE = "FILE.jsonl"  # as a task: questions of one's own
MAX_SHOTS = 5  # as many as dev/ of MMLU has of each subject
