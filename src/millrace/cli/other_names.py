"""Options of vLLM, TensorRT-LLM, llama.cpp and Triton: what means the same here, and what is not needed."""

from collections.abc import Collection

REPOSITORY = "--model-repository"
_LOG, _TLS, _KEY, _TRACE = "--log-level", "--ssl-certfile", "--ssl-keyfile", "--trace-config"
_SAME = {
    "--max-model-len": "--max-context", "--ctx-size": "--max-context", "-c": "--max-context",
    "--max-num-seqs": "--max-batch", "--parallel": "--max-batch", "--dtype": "--precision",
    "--quantization": "--precision", "--n-predict": "--max-tokens", "--temp": "--temperature",
    "--cache-type-k": "--kv-cache-dtype", "--gpu-memory-utilization": "--kv-memory", "--model": "MODEL", "-m": "MODEL",
    **dict.fromkeys(("--max-seq-len", "--context-length", "--num-ctx", "--max-input-len", "--max-num-tokens"),
                    "--max-context"),
    **dict.fromkeys(("--max-running-requests", "--max-batch-size", "--num-parallel"), "--max-batch"),
    **dict.fromkeys(("--kv-cache-free-gpu-memory-fraction", "--mem-fraction-static", "--num-gpu-blocks-override",
                     "--free-gpu-memory-fraction", "--kv-cache-memory-bytes"), "--kv-memory"),
    **dict.fromkeys(("--cpu-offload-gb", "--swap-space", "--kv-offloading-size", "--host-cache-size"), "--kv-tier"),
    **dict.fromkeys(("--enable-prefix-caching", "--enable-block-reuse"), "--prefix-cache"),
    **dict.fromkeys(("--no-enable-prefix-caching", "--disable-radix-cache"), "--no-prefix-cache"),
    **dict.fromkeys(("--scheduling-policy", "--schedule-policy"), "--schedule"),
    **dict.fromkeys(("--uvicorn-log-level", "--log-level-http"), _LOG), "--allowed-origins": "--cors-origin",
    "--api-key": "--api-key-file", "--cache-type-v": "--kv-cache-dtype", "--kv-cache-type": "--kv-cache-dtype",
    "--alias": "--served-model-name", "-a": "--served-model-name", "--model-name": "--served-model-name",
    "--otlp-traces-endpoint": _TRACE, "--threads-http": "--threads", "-t": "--threads", "--n-gpu-layers": "--device",
    "-ngl": "--device", "--gpus": "--device", "--model-path": "MODEL", "--model-dir": "MODEL", "--engine-dir": "MODEL",
    "--checkpoint-dir": "MODEL", "--hf-repo": "MODEL", "-hf": "MODEL", "--output-dir": "--output",
    "--load-format": "--random-weights", "--extra-llm-api-options": "--config",
    "--max-concurrent-requests": "--max-queued",
    # Triton's
    "--model-store": REPOSITORY, "--http-port": "--port", "--http-address": "--host", "--grpc-address": "--host",
    "--metrics-address": "--host", "--reuse-http-port": "--reuse-port", "--reuse-grpc-port": "--reuse-port",
    "--allow-grpc": "--grpc-port", "--allow-metrics": "--metrics-port", "--exit-timeout-secs": "--drain-timeout-s",
    **dict.fromkeys(("--log-verbose", "--log-info", "--log-warning", "--log-error"), _LOG),
    **dict.fromkeys(("--grpc-use-ssl", "--grpc-server-cert"), _TLS), "--grpc-server-key": _KEY,
    **dict.fromkeys((f"--trace-{key}" for key in ("file", "level", "rate", "count", "log-frequency")), _TRACE),
    "--response-cache-byte-size": "--cache-config",
}  # fmt: skip
_GPU, _FOLDER = "there is no GPU that tensor models run on", "backends are packages: docs/extending/tensor-backend.md"
_THREADS, _PARAMETERS = "one event loop takes all requests", "parameters { } in a model's config.pbtxt say it"
_ALWAYS = "configurations are always completed"
# Of Triton's, and some of vLLM's, that have no counterpart: why nothing is lost without them.
_UNNEEDED = {
    "--tensor-parallel-size": "a model runs on one GPU", "-tp": "a model runs on one GPU",
    **dict.fromkeys(("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--tp-size", "--pp-size",
                     "--ep-size", "--enable-expert-parallel"), "a model runs on one device"),
    **dict.fromkeys(("--tokenizer", "--hf-config-path"), "the checkpoint's own is used"),
    **dict.fromkeys(("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "--jinja",
                     "--chat-template-content-format"), "the chat template says how calls and reasoning are written"),
    **dict.fromkeys(("--trust-remote-code", "--allow-remote-code"), "no code of a checkpoint is ever run"),
    **dict.fromkeys(("--enable-chunked-prefill", "--cont-batching", "--enable-in-flight-batching"), "it is always on"),
    **dict.fromkeys(("--disable-log-requests", "--disable-log-stats", "--no-enable-log-requests"),
                    "prompts are never logged; --log-level warning leaves out a line for each request"),
    **dict.fromkeys(("--max-num-batched-tokens", "--block-size", "--ubatch-size", "--batch-size", "-b"),
                    "it follows the measured times of steps"),
    **dict.fromkeys(("--guided-decoding-backend", "--structured-outputs-config"), "llguidance compiles all grammars"),
    **dict.fromkeys(("--mlock", "--no-mmap", "--numa", "--flash-attn", "-fa"), "the tuner decides what is faster here"),
    "--disable-fastapi-docs": "/docs needs no network", "--max-logprobs": "a request may ask for up to 20",
    "--download-dir": "HF_HOME in the environment says where downloads are", "--verbose": "use --log-level debug",
    "--revision": "write MODEL as org/name@revision", "--root-path": "a reverse proxy can rewrite paths",
    "--enforce-eager": "decode steps are captured at the start, and nothing else is",
    "--allow-http": "HTTP is always there", "--strict-model-config": _ALWAYS,
    "--disable-auto-complete-config": _ALWAYS,
    "--exit-on-error": "a mistake in a repository ends it, a model that cannot be loaded keeps it from being ready",
    "--strict-readiness": "it is ready when every model is", "--backend-config": _PARAMETERS,
    "--log-file": "the log is on stderr: 2> FILE", "--id": "its name is triton, as clients expect",
    "--allow-cpu-metrics": "/metrics has them", "--metrics-interval-ms": "/metrics is of the moment it is asked",
    "--pinned-memory-pool-byte-size": _GPU, "--cuda-memory-pool-byte-size": _GPU, "--allow-gpu-metrics": _GPU,
    "--model-load-gpu-limit": _GPU, "--min-supported-compute-capability": _GPU,
    "--http-thread-count": _THREADS, "--grpc-infer-thread-count": _THREADS, "--backend-directory": _FOLDER,
    "--grpc-infer-allocation-pool-size": "messages are not pooled",
    "--grpc-max-response-pool-size": "messages are not pooled", "--model-load-thread-count": "models load side by side",
}  # fmt: skip


_SWITCHES = ("--allow-client-shm", "--model-namespacing")


def meant_by(option: str, known: Collection[str]) -> str | None:
    """What was expected in place of another program's option, in a command that has the known ones; None: no idea."""
    option = option.lower().replace("_", "-") if option.startswith("--") else option
    if option in known:  # TensorRT-LLM writes underscores
        return f"did you mean {option}?"
    if option in _SAME and _SAME[option] in ("MODEL", *known):
        return f"did you mean {_SAME[option]}?"
    return f"nothing, {_UNNEEDED[option]}" if REPOSITORY in known and option in _UNNEEDED else None


def as_here(arguments: list[str]) -> list[str]:
    """A command line; Triton's switches have a value, and an error of its own says `--allow-client-shm=true`."""
    if arguments[:1] != ["serve"]:
        return arguments
    return [one.removesuffix("=true") if one.removesuffix("=true") in _SWITCHES else one for one in arguments]
