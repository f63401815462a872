"""The command line: a folder per command.

`options.py` declares a command's options and imports little, so that `--help` is fast. `run.py` runs the command,
`output.py` prints its result. `main.py` finds the command and turns every mistake into one clear error.
"""
