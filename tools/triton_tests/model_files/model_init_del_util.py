"""What the tests and the model `model_init_del` tell one another, in files beside its configuration."""

import fcntl
from pathlib import Path

HERE = Path(__file__).parent
STATE = HERE.parents[1]  # outside of the repository


def _changed(name, change):
    with (STATE / f"model_init_del.{name}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        value = change(file.read() or "0")
        file.seek(0)
        file.truncate()
        file.write(str(value))
    return value


def get_count(kind):
    return int(_changed(f"{kind}_count", str))


def inc_count(kind):
    return _changed(f"{kind}_count", lambda text: int(text) + 1)


def reset_count(kind):
    return _changed(f"{kind}_count", lambda text: 0)


def get_delay(kind):
    return float(_changed(f"{kind}_delay", str))


def set_delay(kind, delay):
    return _changed(f"{kind}_delay", lambda text: delay)


def _part(name, text):
    (STATE / f"model_init_del.part_{name}").write_text(text)
    parts = {p.name.rpartition("_")[2]: p.read_text() for p in STATE.glob("model_init_del.part_*")}
    batch = parts.get("batch", "0")
    sequence = parts.get("sequence", "")
    sequence = f"sequence_batching {{ {sequence} }}" if sequence else ""
    (HERE / "config.pbtxt").write_text(f"""backend: "python"
max_batch_size: {batch}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {parts.get("group", "{ count: 1 kind: KIND_CPU }")} ]
{sequence}
""")


def update_instance_group(instance_group):
    _part("group", instance_group)


def update_sequence_batching(sequence_batching):
    _part("sequence", sequence_batching)


def enable_batching():
    _part("batch", "2")


def disable_batching():
    _part("batch", "0")


def update_model_file():
    path = HERE / "1" / "model.py"
    path.write_text(path.read_text() + "\n# changed\n")
