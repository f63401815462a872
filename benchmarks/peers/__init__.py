"""Millrace beside llama.cpp, OpenVINO and transformers: the same weights, the same machine, the same minutes.

`python -m benchmarks.peers` starts one process for each engine and goes round them, so that what the machine does to
one it does to all. Speeds are compared within a round, never across runs.
"""
