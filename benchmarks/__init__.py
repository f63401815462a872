"""The project's own benchmarks: shapes with random weights, measured in process, beside the machine's bandwidth."""
