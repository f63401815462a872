"""From a float checkpoint to a smaller one that answers almost the same: grids, statistics, methods."""
