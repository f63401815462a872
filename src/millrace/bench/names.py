"""Choices of `millrace bench` flags, without imports for a fast --help."""

PATTERNS = ("constant", "poisson", "gamma")  # of arrivals
ENDPOINT_NAMES = ("chat", "completions", "responses", "embeddings", "generate")
HTTP, GRPC = "http", "grpc"  # KServe's two protocols
READING = "reading-speed"  # limits of a good request
