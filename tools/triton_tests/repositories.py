"""Folders of models with the names and tensors that Triton's tests ask for, made of the files in model_files/."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FILES = Path(__file__).parent / "model_files"

Tensor = tuple[
    str, str, str
]  # name, data type without TYPE_, dims; of an input also with " optional: true" behind them

DECOUPLED = "model_transaction_policy { decoupled: true }"
CONTROLS = """control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ]"""


def _tensors(tensors: Sequence[Tensor]) -> str:
    said = []
    for name, data_type, dims in tensors:
        dims, _, optional = dims.partition(" ")
        said.append(f'{{ name: "{name}" data_type: TYPE_{data_type} dims: [ {dims} ] {optional} }}')
    return ", ".join(said)


def config(inputs: Sequence[Tensor], outputs: Sequence[Tensor], batch: int = 0, more: str = "") -> str:
    parts = [f"max_batch_size: {batch}", more]
    if inputs:
        parts.append(f"input [ {_tensors(inputs)} ]")
    return "\n".join([*parts, f"output [ {_tensors(outputs)} ]"]) + "\n"


def parameter(name: str, value: object) -> str:
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}'


def identity(data_type: str, dims: str, batch: int = 0, more: str = "", count: int = 1) -> str:
    inputs = [(f"INPUT{i}", data_type, dims) for i in range(count)]
    outputs = [(f"OUTPUT{i}", data_type, dims.partition(" ")[0]) for i in range(count)]
    return config(inputs, outputs, batch, more)


def two(data_type: str, dims: str, batch: int = 0, more: str = "", out: str = "") -> str:
    inputs = [(f"INPUT{i}", data_type, dims) for i in range(2)]
    outputs = [(f"OUTPUT{i}", out or data_type, dims.partition(" ")[0]) for i in range(2)]
    return config(inputs, outputs, batch, more)


class Repository:
    """A folder that models are written into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, name: str, file: str, config: str, versions: Sequence[int] = (1,)) -> None:
        """file: of model_files/, without .py"""
        for version in versions:
            (self.folder / name / str(version)).mkdir(parents=True, exist_ok=True)
            shutil.copy(FILES / f"{file}.py", self.folder / name / str(version) / "model.py")
        group = "" if "instance_group" in config else "instance_group [ { kind: KIND_CPU } ]\n"
        (self.folder / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n{config}{group}')

    def native(self, name: str, backend: str, config: str) -> None:
        (self.folder / name / "1").mkdir(parents=True)
        (self.folder / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "{backend}"\n{config}')

    def ensemble(
        self, name: str, config: str, steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]
    ) -> None:
        """steps: the model, its inputs and its outputs by the ensemble's name of them"""

        def mapped(kind: str, names: Mapping[str, str]) -> str:
            return " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in names.items())

        said = ", ".join(
            f'{{ model_name: "{model}" model_version: -1 {mapped("input_map", into)} {mapped("output_map", out)} }}'
            for model, into, out in steps
        )
        (self.folder / name / "1").mkdir(parents=True)
        text = f'name: "{name}"\nplatform: "ensemble"\n{config}ensemble_scheduling {{ step [ {said} ] }}\n'
        (self.folder / name / "config.pbtxt").write_text(text)


def http(models: Repository) -> None:
    models.native("onnx_zero_1_float32", "identity", identity("FP32", "-1", 8))
    models.native("onnx_zero_1_object_1_element", "identity", identity("STRING", "1", 8))
    models.native("onnx_zero_1_object", "identity", identity("STRING", "-1", 8))
    models.native("onnx_zero_1_float16", "identity", identity("FP16", "-1,-1", 8))
    models.python("onnx_zero_3_float32", "passthrough", identity("FP32", "-1", 8, count=3))
    policy = "default_queue_policy { max_queue_size: 1 }"
    queue = f"dynamic_batching {{ max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 8 ] {policy} }}"
    slow = identity("FP32", "-1", 8, f"{queue} {parameter('execute_delay_ms', 3000)}")
    models.python("onnx_zero_1_float32_queue", "passthrough", slow)
    models.native("simple_identity", "identity", identity("STRING", "-1", 8))
    models.native("simple_identity_int64", "identity", identity("INT64", "-1", 8))


def generate(models: Repository) -> None:
    inputs = [("PROMPT", "STRING", "-1"), ("STREAM", "BOOL", "1")]
    models.python("mock_llm", "mock_llm", config(inputs, [("TEXT", "STRING", "-1")], 0, DECOUPLED))


def simple(models: Repository) -> None:
    models.native("simple", "add_sub", two("INT32", "16", 8))


def simple_and(count: int) -> Callable[[Repository], None]:
    """Return a function that makes `simple` and `count` - 1 further models."""

    def make(models: Repository) -> None:
        simple(models)
        for i in range(count - 1):
            models.native(f"identity_{i}", "identity", identity("FP32", "-1", 8))

    return make


def parameters(models: Repository) -> None:
    outputs = [("key", "STRING", "-1"), ("value", "STRING", "-1")]
    models.python("parameter", "parameter", config([("INPUT0", "FP32", "1")], outputs))
    models.native("identity", "identity", identity("FP32", "1"))
    models.ensemble("ensemble", config([("INPUT0", "FP32", "1")], outputs), [
        ("identity", {"INPUT0": "INPUT0"}, {"OUTPUT0": "between"}),
        ("parameter", {"INPUT0": "between"}, {"key": "key", "value": "value"}),
    ])  # fmt: skip


def shared_memory(models: Repository) -> None:
    models.native("simple", "add_sub", two("INT32", "16", 8))
    for platform in ("python", "onnx", "libtorch", "plan", "openvino"):
        models.python(f"{platform}_int32_int32_int32", "add_sub", two("INT32", "16", 8))


def slow_simple(models: Repository) -> None:
    models.python("simple", "add_sub", two("INT32", "16", 8, parameter("execute_delay_ms", 6000)))


def metrics(models: Repository) -> None:
    models.native("identity_cache_off", "identity", identity("FP32", "-1", 64))
    models.native("identity_cache_on", "identity", identity("FP32", "-1", 64, "response_cache { enable: true }"))


def queues(models: Repository) -> None:
    delay = parameter("execute_delay_ms", 2000)
    wait = "max_queue_delay_microseconds: 100000"
    idle = "max_sequence_idle_microseconds: 60000000"
    dynamic = f"dynamic_batching {{ preferred_batch_size: [ 4 ] {wait} }}"
    bounded = f"dynamic_batching {{ preferred_batch_size: [ 4 ] {wait} default_queue_policy {{ max_queue_size: 4 }} }}"
    direct = f"sequence_batching {{ {idle} {CONTROLS} direct {{ {wait} minimum_slot_utilization: 1.0 }} }}"
    together = f"max_candidate_sequences: 4 preferred_batch_size: [ 4 ] {wait}"
    oldest = f"sequence_batching {{ {idle} {CONTROLS} oldest {{ {together} }} }}"
    for name, more in {
        "default": "", "dynamic": dynamic, "max_queue_size": bounded, "sequence_direct": direct,
        "sequence_oldest": oldest, "dynamic_composing": dynamic, "default_composing": "",
    }.items():  # fmt: skip
        models.python(name, "passthrough", identity("FP32", "1", 4, f"{delay} {more}"))
    outputs = [("ENSEMBLE_OUTPUT0", "FP32", "1"), ("ENSEMBLE_OUTPUT1", "FP32", "1")]
    models.ensemble("ensemble", config([("ENSEMBLE_INPUT0", "FP32", "1")], outputs, 4), [
        ("dynamic_composing", {"INPUT0": "ENSEMBLE_INPUT0"}, {"OUTPUT0": "ENSEMBLE_OUTPUT0"}),
        ("default_composing", {"INPUT0": "ENSEMBLE_INPUT0"}, {"OUTPUT0": "ENSEMBLE_OUTPUT1"}),
    ])  # fmt: skip


def histograms(models: Repository) -> None:
    out = [("DUMMY_OUT", "FP32", "1")]
    models.python("async_execute", "wait", config([("WAIT_SECONDS", "FP32", "1")], out))
    inputs = [("WAIT_SECONDS", "FP32", "1"), ("RESPONSE_NUM", "UINT8", "1")]
    models.python("async_execute_decouple", "wait", config(inputs, out, 0, DECOUPLED))
    tensors = [("INPUT0", "FP32", "1"), ("INPUT1", "UINT8", "1")], [("OUTPUT", "FP32", "1")]
    models.ensemble("ensemble", config(*tensors), [
        ("async_execute", {"WAIT_SECONDS": "INPUT0"}, {"DUMMY_OUT": "between"}),
        ("async_execute_decouple", {"WAIT_SECONDS": "between", "RESPONSE_NUM": "INPUT1"}, {"DUMMY_OUT": "OUTPUT"}),
    ])  # fmt: skip


def load_times(models: Repository) -> None:
    models.python("libtorch_float32_float32_float32", "add_sub", two("FP32", "16", 8))
    policy = "version_policy { all { } }"
    inputs = [(f"INPUT{i}", "FP32", "1 optional: true") for i in range(3)]
    said = config(inputs, [("OUTPUT0", "FP32", "1")], 0, policy)
    models.python("input_all_optional", "slow_version", said, (1, 2))


def validation(models: Repository) -> None:
    def three(*optional: bool) -> str:
        inputs = [(f"INPUT{i}", "FP32", "-1 optional: true" if o else "-1") for i, o in enumerate(optional)]
        return config(inputs, [("OUTPUT0", "FP32", "-1")])

    models.python("input_all_required", "passthrough", three(False, False, False))
    models.python("input_optional", "passthrough", three(False, False, False, True))
    models.python("input_all_optional", "passthrough", three(True, True, True))
    models.native("pt_identity", "identity", identity("FP32", "8", 8))
    models.python("graphdef_object_int32_int32", "add_sub", two("STRING", "16", 8, out="INT32"))


def cancelled(models: Repository) -> None:
    slow = parameter("execute_delay_ms", 6000)
    dynamic = "dynamic_batching { max_queue_delay_microseconds: 1000000 }"
    sequence = f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {CONTROLS} KIND }}"
    for name, batch, more in (
        ("dynamic_batch", 2, dynamic), ("no_batching", 2, ""),
        ("no_batching_cache", 2, "response_cache { enable: true }"),
        ("sequence_direct", 1, sequence.replace("KIND", "direct { }")),
        ("sequence_oldest", 1, sequence.replace("KIND", "oldest { max_candidate_sequences: 1 }")),
    ):  # fmt: skip
        models.python(name, "passthrough", identity("FP32", "8", batch, f"{slow} {more}"))
    tensors = [("INPUT0", "FP32", "8")], [("OUTPUT0", "FP32", "8")]
    models.ensemble("ensemble_model", config(*tensors, 2), [
        ("no_batching", {"INPUT0": "INPUT0"}, {"OUTPUT0": "between"}),
        ("dynamic_batch", {"INPUT0": "between"}, {"OUTPUT0": "OUTPUT0"}),
    ])  # fmt: skip


def slow_identity(delay_ms: int) -> Callable[[Repository], None]:
    def make(models: Repository) -> None:
        more = parameter("execute_delay_ms", delay_ms)
        models.python("custom_identity_int32", "passthrough", identity("INT32", "-1", 8, more))

    return make


def execute_cancel(models: Repository, decoupled: bool = False) -> None:
    tensors = [("EXECUTE_DELAY", "FP32", "1")], [("OUT", "STRING", "1")]
    models.python("execute_cancel", "execute_cancel", config(*tensors, 1, DECOUPLED if decoupled else ""))


def repeats(models: Repository) -> None:
    inputs = [("IN", "INT32", "-1"), ("DELAY", "UINT32", "-1"), ("WAIT", "UINT32", "1")]
    outputs = [("OUT", "INT32", "1"), ("IDX", "UINT32", "1")]
    names = {name: name for name, _, _ in inputs}
    models.native("repeat_int32", "repeat", config(inputs, outputs, 0, DECOUPLED))
    first = {"OUT": "OUT", "IDX": "IDX"}
    models.ensemble("simple_repeat", config(inputs, outputs), [("repeat_int32", names, first)])
    models.native("identity_int32", "identity", identity("INT32", "1"))
    models.ensemble("sequence_repeat", config(inputs, outputs), [
        ("repeat_int32", names, {"OUT": "between", "IDX": "IDX"}),
        ("identity_int32", {"INPUT0": "between"}, {"OUTPUT0": "OUT"}),
    ])  # fmt: skip


def instances(models: Repository) -> None:
    folder = models.folder / "model_init_del"
    models.python("model_init_del", "model_init_del", identity("FP32", "-1"))
    shutil.copy(FILES / "model_init_del_util.py", folder / "util.py")


def senders(models: Repository) -> None:
    inputs = [
        ("NUMBER_OF_RESPONSE_BEFORE_RETURN", "UINT8", "1"), ("SEND_COMPLETE_FINAL_FLAG_BEFORE_RETURN", "BOOL", "1"),
        ("RETURN_A_RESPONSE", "BOOL", "1"), ("NUMBER_OF_RESPONSE_AFTER_RETURN", "UINT8", "1"),
        ("SEND_COMPLETE_FINAL_FLAG_AFTER_RETURN", "BOOL", "1"),
    ]  # fmt: skip
    for decoupled in ("", "_decoupled"):
        for way in ("", "_async"):
            for batching in ("", "_batching"):
                more = DECOUPLED if decoupled else ""
                more += " dynamic_batching { max_queue_delay_microseconds: 500000 }" if batching else ""
                said = config(inputs, [("INDEX", "UINT16", "1")], 8, more)
                models.python(f"response_sender{decoupled}{way}{batching}", f"response_sender{way}", said)


def decoupled(models: Repository) -> None:
    float_io = [("IN", "FP32", "-1,-1")], [("OUT", "FP32", "-1,-1")]
    int_io = [("IN", "INT32", "1")], [("OUT", "INT32", "1")]
    for name in ("decoupled_execute_error", "decoupled_bls"):
        models.python(name, name, config(*float_io, 0, DECOUPLED))
    models.python("decoupled_raise_exception", "raises", config(*float_io, 0, DECOUPLED))
    models.python("identity_fp32", "passthrough", identity("FP32", "-1,-1"))
    models.python("decoupled_bls_stream", "decoupled_bls_stream", config(*int_io, 0, DECOUPLED))
    models.python("square_int32", "square", config(*int_io, 0, DECOUPLED))
    wide = two("FP32", "16", 0, DECOUPLED)
    models.python("decoupled_return_response_error", "decoupled_return_response", wide)
    models.python("decoupled_send_after_close_error", "decoupled_send_after_close", wide)
    execute_cancel(models, decoupled=True)


def lifecycle(models: Repository) -> None:
    models.python(
        "error_code", "error_code", config([("ERROR_CODE", "STRING", "1")], [("DUMMY_OUT", "STRING", "1")], 4)
    )
    execute_cancel(models)
    batch = "dynamic_batching { preferred_batch_size: [ 6 ] max_queue_delay_microseconds: 1000000 }"
    models.python("execute_error", "execute_error", config([("IN", "FP32", "-1")], [("OUT", "FP32", "-1")], 6, batch))
    models.python("wrong_model", "wrong_model", config([("IN", "UINT32", "-1")], [("OUT", "UINT32", "-1")], 64))
    said = config([("INPUT", "FP32", "-1")], [("OUTPUT", "FP32", "-1")], 4)
    models.python("execute_return_error", "execute_return_error", said)


def control(models: Repository) -> None:
    models.python("identity_fp32", "passthrough", identity("FP32", "-1", 64))
    tensors = [("INPUT0", "FP32", "-1")], [("OUTPUT0", "FP32", "-1")]
    step = ("identity_fp32", {"INPUT0": "INPUT0"}, {"OUTPUT0": "OUTPUT0"})
    models.ensemble("simple_identity_fp32", config(*tensors, 64), [step])
    models.python("auto_complete_error", "fails_to_complete", identity("FP32", "-1", 64))


def response_parameters(models: Repository) -> None:
    said, out = ("RESPONSE_PARAMETERS", "STRING", "1"), [("OUTPUT", "STRING", "1")]
    models.python("response_parameters", "response_parameters", config([said], out, 8))
    models.python("response_parameters_decoupled", "response_parameters", config([said], out, 8, DECOUPLED))
    both = [said, ("RESPONSE_PARAMETERS_DECOUPLED", "STRING", "1")]
    models.python("response_parameters_bls_decoupled", "response_parameters_bls", config(both, out, 8))


def readiness(models: Repository) -> None:
    models.python("identity_fp32", "passthrough", identity("FP32", "-1", 64))
    for name, ready in {
        "returns_true": "true", "returns_false": "false", "raises_error": "raises",
        "returns_non_boolean": "text", "timeout": "late",
    }.items():  # fmt: skip
        said = identity("FP32", "-1", 64, parameter("ready", ready))
        models.python(f"is_model_ready_fn_{name}", "ready", said)


def python(models: Repository) -> None:
    batch = "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 12000000 }"
    models.python("identity_uint8", "passthrough", identity("UINT8", "-1", 64, batch))
    models.python("identity_bool", "passthrough", identity("BOOL", "-1", 64))
    models.python("init_args", "init_args", config([("IN", "FP32", "-1")], [("OUT", "FP32", "1")], 64))
    models.python("string", "passthrough", identity("STRING", "-1"))
    models.python("string_fixed", "string_fixed", identity("STRING", "-1"))
    models.python("optional", "add_sub", two("INT32", "1 optional: true"))
    outputs = [(f"OUTPUT{i}", "FP32", "-1,-1,-1,-1,-1") for i in range(3)]
    models.python("non_contiguous", "non_contiguous", config([("INPUT0", "FP32", "-1,-1,-1,-1,-1")], outputs))


def concurrent(models: Repository) -> None:
    said = config([("WAIT_SECONDS", "FP32", "1")], [("DUMMY_OUT", "FP32", "1")], 8, DECOUPLED)
    models.python("async_execute_decouple", "wait_each", said)
    models.python("async_execute_decouple_bls", "wait_bls", said)


def nan_inf(models: Repository) -> None:
    models.python("nan_inf_output", "nan_inf", config([("INPUT0", "FP32", "1")], [("OUTPUT0", "FP32", "6")]))


def unittests(models: Repository) -> None:
    """`unittests`, which waits for its file, and what Triton's BLS tests ask."""
    models.python("unittests", "unittests", config([("IN", "INT32", "1")], [("OUT", "STRING", "1")]))
    models.python("add_sub", "add_sub", two("FP32", "16"))
    models.python("square_int32", "square", config([("IN", "INT32", "1")], [("OUT", "INT32", "1")], 0, DECOUPLED))
    models.python("identity_fp32", "passthrough", identity("FP32", "-1", 64))
    models.python("execute_error", "execute_error", config([("IN", "FP32", "-1")], [("OUT", "FP32", "-1")]))
    policy = "timeout_action: REJECT allow_timeout_override: true default_timeout_microseconds: 1000000"
    batching = f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"
    models.python("identity_fp32_timeout", "passthrough", identity("FP32", "-1", 10, batching))
