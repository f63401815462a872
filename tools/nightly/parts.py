"""The parts of a night, each of at most an hour: what it runs, and what it shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.build import cmake_args
from millrace.machine.cpu import cpu_flags
from tests.support.drawn import NIGHT, TIMES

ROOT = Path(__file__).parents[2]
MINUTES = 60  # that a part may take before it is stopped, which makes it red


@dataclass(frozen=True, slots=True)
class Part:
    """`command` runs in the root of the repository; {python} is this interpreter, {seed} goes on where the last ended.

    Its exit code decides; figures that are worth keeping it prints as one line of JSON, the last. Where it is pytest,
    its tests may print such lines anywhere, and it is red if it does not tell how many passed.
    """

    name: str
    about: str
    command: tuple[str, ...]
    cases: int = 0  # drawn from {seed}, which is another each night
    packages: tuple[str, ...] = ()  # what its environment has beside ours; then {python} is that environment's
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # of the product and its tests that it covers: its result is stale if these changed
    emulates: tuple[str, ...] = ()  # instruction sets whose kernels it runs on emulated instructions, not on hardware

    @property
    def runs_kernels(self) -> bool:
        """Whether its result depends on the native kernels, and so on the instruction sets of its machine."""
        return "native" in self.files

    @property
    def is_pytest(self) -> bool:
        return "pytest" in self.command


ISAS = ("amx", "avx512", "avx2", "scalar")  # that kernels are built for
FUZZ_CASES = 100_000
SLOW_CASES = {"gpu_engines": 10_000, "structured": 20_000}  # 60 to 100 a second
# Of a language model's answers, from its file to the kernels; and served, from the socket on.
ENGINES = ("src/millrace/checkpoint", "src/millrace/compile", "src/millrace/engine", "src/millrace/graph",
           "src/millrace/kernels", "src/millrace/model", "native")  # fmt: skip
SERVER = ("src/millrace/checkpoint", "src/millrace/engine", "src/millrace/runtime", "src/millrace/serve",
          "src/millrace/model_repository", "src/millrace/prometheus.py", "native")  # fmt: skip
# Pinned: a comparison is with a version. Built from source, as the benchmarks build it.
LLAMA_CPP = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "openvino==2026.4.1")
BESIDE_LLAMA_CPP = ("tests/checkpoint/gguf", "tests/benchmarks")
BESIDE_TRITON = (
    "tests/nightly/test_tritonclient.py", "tests/nightly/test_triton_repository.py",
    "tests/nightly/test_triton_repository_grpc.py", "tests/nightly/test_triton_sequences.py",
    "tests/nightly/test_triton_models.py", "tests/nightly/test_triton_operations.py",
    "tests/model_repository/config/test_pbtxt_parser.py",
)  # fmt: skip
PERF_ANALYZER = "tests/nightly/test_perf_analyzer.py"
PROMTOOL = "tests/nightly/test_promtool.py"  # the distribution's: apt-get install -y prometheus
SPANS = "tests/serve/test_spans.py"
RAISES = "tests/model_repository/test_python_faults.py"
MODEL_IMPORTS = "tests/model_repository/test_model_imports.py"
OCR = "tests/nightly/test_ocr.py"
BITSANDBYTES = "tests/checkpoint/bitsandbytes"
JSON_SCHEMA = "tests/nightly/test_json_schema.py"
ANSWERS = "tests/nightly/test_answers.py"
TUTORIAL = "tests/nightly/test_tutorial.py"
EMULATED_AMX = ("tests/kernels", "tests/engine/test_emulated_amx.py")
BY_EMULATED_AMX = "amx_emulated or emulated_amx or emulated_tiles"  # in names of tests
BESIDE_LM_EVAL = ("tests/nightly/test_mmlu.py", "tests/nightly/test_wikitext.py")

# Of the server, and how they look. Chromium is the distribution's: apt-get install -y chromium.
PAGES = ("src/millrace/serve/ops/playground.html", "src/millrace/serve/ops/timeline.html", "src/millrace/report",
         "src/millrace/size/report/size_page.html")  # fmt: skip


# The files whose handling of hostile input each fuzzer covers.
FUZZED: Mapping[str, tuple[str, ...]] = {
    "safetensors": ("src/millrace/checkpoint",),
    "gguf": ("src/millrace/checkpoint",),
    "config": ("src/millrace/checkpoint",),
    "sentences": ("src/millrace/checkpoint",),
    "tokenizer": ("src/millrace/checkpoint",),
    "program": ("src/millrace/compile/lower_cpu/program.py", "src/millrace/engine", "native"),
    "gpu_engines": ("src/millrace/engine", "src/millrace/compile/lower_gpu/from_engine.py"),
    "requests": ("src/millrace/serve", "src/millrace/model_repository", "src/millrace/runtime"),
    "pbtxt": ("src/millrace/model_repository",),
    "tensors": ("src/millrace/serve/protocols/kserve", "src/millrace/model_repository"),
    "structured": ("src/millrace/runtime",),
}


def _fuzz(target: str) -> Part:
    cases = SLOW_CASES.get(target, FUZZ_CASES)
    command = ("{python}", "-m", "tests.fuzz", target, "--cases", str(cases), "--seed", "{seed}")
    return Part(
        f"fuzz-{target}",
        f"{cases:,} mutated inputs, with new seeds each night",
        command,
        cases,
        files=("tests/fuzz", *FUZZED[target]),
    )


def _client(name: str) -> Part:
    command = ("{python}", "-m", "tools.clients", name)
    return Part(
        f"client-{name}",
        f"{name} against `millrace serve`",
        command,
        files=("tools/clients", "src/millrace/serve", "src/millrace/runtime"),
    )


def _backend(name: str, about: str, *packages: str) -> Part:
    """Of a model repository, whose tests skip where its package is not there."""
    test = f"tests/model_repository/test_{name}.py"
    return Part(
        name, f"a served repository's {about}", ("{python}", "-m", "pytest", "--skips", "none", test),
        packages=packages, files=(test, "src/millrace/model_repository"),
    )  # fmt: skip


def _holding(text: str, folder: str = "tests") -> tuple[str, ...]:
    """The files of tests that hold it."""
    files = (path for path in sorted((ROOT / folder).rglob("test_*.py")) if text in path.read_text())
    return tuple(str(path.relative_to(ROOT)) for path in files)


def _marked(mark: str) -> tuple[str, ...]:
    return _holding(f"pytest.mark.{mark}")


DRAWN_OF_SERVE = (*_holding("@given", "tests/serve"), *_holding("@given", "tests/model_repository"))
FUZZERS = ("safetensors", "gguf", "config", "sentences", "tokenizer", "program", "gpu_engines", "requests", "pbtxt",
           "tensors", "structured")  # fmt: skip
CLIENTS = (
    "openai", "litellm", "langchain", "llama-index", "instructor", "pydantic-ai", "smolagents", "openai-agents", "llm",
    "dspy", "aiperf", "guidellm", "lm-eval", "anthropic", "ollama", "codex", "claude-code",
)  # fmt: skip
PARTS = (
    Part(
        "llama-cpp", "tokens and logits of quantised files and a real model beside llama.cpp's, exported weights",
        ("{python}", "-m", "pytest", "-m", "not timing", "--skips", "none", *BESIDE_LLAMA_CPP),
        packages=LLAMA_CPP, environment={"CMAKE_ARGS": cmake_args(cpu_flags())},
        files=(*BESIDE_LLAMA_CPP, *ENGINES, "benchmarks/peers", "benchmarks/recipes.py", "benchmarks/perplexity.py"),
    ),
    Part(
        "slow-tests", "tests that take minutes",
        ("{python}", "-m", "pytest", "-m", "nightly", "-k", f"not ({BY_EMULATED_AMX})", "--skips", "known",
         f"--ignore={TUTORIAL}", f"--ignore={ANSWERS}"),
        files=(*_marked("nightly"), "docs/extending", *ENGINES, *SERVER),
    ),
    Part(
        "emulated-amx", "all kernels and the recorded logits of AMX's unit on emulated tiles, which need no AMX",
        ("{python}", "-m", "pytest", "-m", "not timing", "-k", BY_EMULATED_AMX, "--skips", "known", *EMULATED_AMX),
        files=(*EMULATED_AMX, "tests/engine/golden.json", "tests/engine/test_golden.py", "tests/native/emulated",
               "tests/support/emulated_amx.py", "src/millrace/kernels", "src/millrace/engine", "native",
               "CMakeLists.txt"),
        emulates=("amx",),
    ),
    Part(
        "mmlu", "questions of all 57 subjects, choices and WikiText beside lm-eval on transformers, one by one",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", *BESIDE_LM_EVAL),
        packages=("lm-eval==0.4.13", "accelerate==1.15.0"),
        files=(*BESIDE_LM_EVAL, *ENGINES, "src/millrace/evaluate", "src/millrace/cli/eval"),
    ),
    Part(
        "tritonclient", "Triton's own client on a served repository, and on the load generator's null server",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", *BESIDE_TRITON),
        packages=("tritonclient[http,grpc]==2.73.0",),
        files=(
            *BESIDE_TRITON, "src/millrace/bench/null_server/kserve.py", "src/millrace/bench/null_server/grpc.py",
            "src/millrace/serve/protocols/kserve", "src/millrace/model_repository",
        ),
    ),
    Part(
        "perf-analyzer", "Triton's load generator in C++ on a served repository: tensors, shared memory, sequences",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", PERF_ANALYZER),
        packages=("tritonclient[http,grpc]==2.44.0", "nvidia-cuda-runtime-cu12==12.9.79"),
        files=(PERF_ANALYZER, "src/millrace/serve/protocols/kserve", "src/millrace/model_repository"),
    ),
    _backend("onnxruntime", "networks as ONNX, beside NumPy and onnx's own evaluator", "onnxruntime==1.31.1",
             "onnx==1.23.2"),
    _backend("sklearn", "estimators of skops, beside scikit-learn itself", "scikit-learn==1.9.1", "skops==0.16.0"),
    _backend("xgboost", "trees, beside XGBoost's own answers", "xgboost-cpu==3.2.0"),
    _backend("pytorch", "networks as TorchScript and torch.export's programs, beside their modules called as Python",
             "torch==2.13.0"),
    _backend("openvino", "networks as IR and ONNX, beside NumPy", "openvino==2026.4.1", "onnx==1.23.2"),
    _backend("tensorflow", "SavedModels, beside the functions they were saved from", "tensorflow-cpu==2.21.0"),
    Part(
        "raises", "a model.py that raises 10,000 times leaves memory flat, in the server's process and in its own",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", RAISES),
        files=(RAISES, "src/millrace/model_repository"),
    ),
    Part(
        "model-imports", "a model.py that imports PyTorch, transformers, OpenCV, scikit-learn, ONNX Runtime",
        ("{python}", "-m", "pytest", "--skips", "none", MODEL_IMPORTS),
        packages=("opencv-python-headless==5.0.0.93", "scikit-learn==1.9.1", "onnxruntime==1.31.1"),
        files=(MODEL_IMPORTS, "src/millrace/model_repository"),
    ),
    Part(
        "opentelemetry", "spans of tensor and language models, as a collector gets them over OTLP",
        ("{python}", "-m", "pytest", "--skips", "none", SPANS),
        packages=("opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"),
        files=(SPANS, "src/millrace/model_repository", "src/millrace/serve/ops/otel_genai.py"),
    ),
    Part(
        "ocr", "examples/ocr, an ensemble and a model that asks models, reads pages as rapidocr does",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", OCR),
        packages=("onnxruntime==1.31.1", "rapidocr-onnxruntime==1.4.4", "pillow==13.0.0"),
        files=(OCR, "examples/ocr", "src/millrace/model_repository"),
    ),
    Part(
        "answers", "examples/answers on all-MiniLM-L6-v2 and SmolLM2: guarded, found, answered and streamed",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", ANSWERS),
        files=(ANSWERS, "examples/answers", "src/millrace/model_repository"),
    ),
    Part(
        "json-schema", "random answers held to random schemas, validated by jsonschema",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", JSON_SCHEMA),
        packages=("jsonschema==4.26.0",), files=(JSON_SCHEMA, "tests/fuzz/schemas.py", "src/millrace/runtime"),
    ),
    Part(
        "bitsandbytes", "matrices as the library itself stores and reads them",
        ("{python}", "-m", "pytest", "--skips", "none", BITSANDBYTES), packages=("bitsandbytes==0.50.2",),
        files=(BITSANDBYTES, "src/millrace/checkpoint/bitsandbytes"),
    ),
    Part(
        "promtool", "the alerts of examples/monitoring by Prometheus' own tool",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "none", PROMTOOL),
        files=(PROMTOOL, "examples/monitoring", "src/millrace/prometheus.py", "src/millrace/serve/ops"),
    ),
    Part(
        "beside-aiperf", "AIPerf and `millrace bench` in turns on servers whose times are known; needs an idle machine",
        ("{python}", "-m", "tools.beside_aiperf"), files=("tools/beside_aiperf", "src/millrace/bench"),
    ),
    Part(
        "tutorial", "docs/tutorial.md on tiny, SmolLM2 and Gemma's shape, and its notebook: figures computed again",
        ("{python}", "-m", "pytest", "-m", "nightly", "--skips", "known", "-s", TUTORIAL),
        packages=("nbclient==0.11.0", "ipykernel==7.4.0"),
        files=(TUTORIAL, "docs/tutorial.md", "tools/tutorial", "src/millrace/bench", "src/millrace/tune"),
    ),
    Part(
        "playground", "the server's pages in Chromium, by keyboard, on a desktop's and a phone's screen",
        ("{python}", "-m", "pytest", "--skips", "none", "tests/browser"),
        packages=("playwright==1.65.2",), files=("tests/browser", *PAGES, *SERVER),
    ),
    Part(
        "timing", "tests that judge times; needs an idle machine", ("{python}", "-m", "pytest", "-m", "timing", "-s"),
        files=(*_marked("timing"), *ENGINES, *SERVER),
    ),
    Part(
        "schedules", f"random schedules of the runtime, {TIMES} times the fast suite's, with a new seed each night",
        ("{python}", "-m", "pytest", "-m", "hypothesis", "--hypothesis-profile", NIGHT, "--hypothesis-seed", "{seed}",
         "--timeout", str(60 * MINUTES), "tests/runtime"),
        TIMES, files=(*_holding("@given", "tests/runtime"), "tests/support/drawn.py", "src/millrace/runtime"),
    ),
    Part(
        "schedules-serve", f"batchers, sequences, ensembles, limits, configs: {TIMES} times what the fast suite draws",
        ("{python}", "-m", "pytest", "-m", "hypothesis", "--hypothesis-profile", NIGHT, "--hypothesis-seed", "{seed}",
         "--timeout", str(60 * MINUTES), *DRAWN_OF_SERVE),
        TIMES,
        files=(*DRAWN_OF_SERVE, "tests/support/drawn.py", "tests/support/batching_rules.py",
               "tests/support/sequence_rules.py", "src/millrace/model_repository"),
    ),
    Part(
        "load", "200 clients of one long prompt for ten minutes, a third of whose requests are left",
        ("{python}", "-m", "tools.load", "tiny"), files=("tools/load", *SERVER),
    ),
    *map(_fuzz, FUZZERS),
    *map(_client, CLIENTS),
)  # fmt: skip
