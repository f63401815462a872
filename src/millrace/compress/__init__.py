"""Compresses a float checkpoint to a smaller one with nearly the same answers: grids, statistics, methods."""
