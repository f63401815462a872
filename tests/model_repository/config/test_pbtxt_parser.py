"""Reading config.pbtxt: against protobuf's own reader, and where it must refuse, the line and column."""

import random
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings

from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import RANGES, FieldSpec, specs
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.pbtxt_binder import MAX_PROBLEMS, ParsedConfig, read_config
from millrace.model_repository.config.problems import Level
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from tests.model_repository.config.descriptor import messages, same
from tests.support.drawn import SEEDS, examples

FILE = Path("m/config.pbtxt")


def read(text: str | bytes) -> ParsedConfig:
    return read_config(text if isinstance(text, bytes) else text.encode(), FILE)


def errors(found: ParsedConfig) -> list[tuple[str, str]]:
    return [(p.location.removeprefix("m/config.pbtxt"), p.what) for p in found.problems if p.level is Level.ERROR]


def parsed(text: str) -> Any:
    return text_format.Parse(text, message("ModelConfig")())


class Drawn:
    """A configuration as somebody may write it: spellings, separators, comments, lists or fields one by one."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def pick(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def message(self, cls: type, depth: int = 0) -> str:
        known = list(specs(cls).values())
        chosen = self.rng.sample(known, self.rng.randint(0, min(len(known), 3 if depth else 8)))
        groups = [s.oneof for s in chosen]
        chosen = [s for i, s in enumerate(chosen) if not s.oneof or s.oneof not in groups[:i]]
        return "".join(self.field(s, depth) for s in chosen)

    def field(self, spec: FieldSpec, depth: int) -> str:
        end, space = self.pick("\n", " ", ", ", ";\n", " # 'a comment'\n"), self.pick("", " ", "\n\t")
        block = spec.kind in ("message", "map")
        colon = self.pick(":", "") if block else ":"
        many = self.rng.randint(0, 3) if spec.repeated or spec.kind == "map" else 1
        values = [self.value(spec, depth, i) for i in range(many)]
        if (spec.repeated or spec.kind == "map") and self.rng.random() < 0.5:
            return f"{spec.name}{colon}{space}[{', '.join(values)}]{end}"
        return "".join(f"{spec.name}{colon}{space}{value}{end}" for value in values)

    def value(self, spec: FieldSpec, depth: int, index: int) -> str:
        if spec.kind == "map":
            key = f'"k{index}"' if spec.key and spec.key.kind == "string" else str(index)
            return "{" + f"key: {key} value: {self.value(spec.value_type, depth + 1, 0)}" + "}"
        if spec.kind == "message":
            inner = self.message(spec.value_type, depth + 1)
            return self.pick(f"{{{inner}}}", f"<{inner}>")
        return self.scalar(spec)

    def scalar(self, spec: FieldSpec) -> str:
        if spec.kind in RANGES:
            low, high = RANGES[spec.kind]
            number = self.rng.choice([low, high, 0, 1, self.rng.randint(low, high)])
            return self.pick(str(number), hex(number))
        if spec.kind == "enum":
            return str(self.rng.choice(list(spec.value_type)).name)
        if spec.kind == "bool":
            return self.pick("true", "false", "True", "False", "t", "f", "0", "1")
        if spec.kind == "string":
            text = "".join(self.rng.choices("aZ 0é猫😀#{}[]<>:,;'\"\\\n\t\r\x01\x7f", k=self.rng.randint(0, 6)))
            escaped = text_format.text_encoding.CEscape(text.encode(), as_utf8=self.rng.random() < 0.5)
            return f'"{escaped}"' + self.pick("", " 'b'")
        number = struct.unpack("<f", struct.pack("<f", self.rng.uniform(-3e38, 3e38)))[0]
        return self.pick(
            repr(number), repr(self.rng.random()), "7", "-3", "inf", "-inf", "nan", "1e3f", ".5", "2.", "-0."
        )


@settings(max_examples=examples(200))
@given(SEEDS)
def test_it_reads_what_protobuf_reads(seed: int) -> None:
    text = Drawn(seed).message(ModelConfig)
    found = read(text)
    assert [what for _, what in errors(found) if "is not supported" not in what] == [], text
    assert same(found.config, parsed(text)), text


@settings(max_examples=examples(300))
@given(SEEDS)
def test_what_protobuf_refuses_is_refused(seed: int) -> None:
    """One character another: whatever protobuf makes of it, we make the same or name a place."""
    drawn = Drawn(seed)
    text = drawn.message(ModelConfig) or "name: 'a'"
    at = drawn.rng.randrange(len(text))
    broken = text[:at] + drawn.pick("", "}", '"', ":", "x", "[", "\n", "9") + text[at + 1 :]
    found = read(broken)
    try:
        theirs = parsed(broken)
    except (text_format.ParseError, DeprecationWarning):  # the latter is Python's, of an escape that is none
        if re.search(r"-\n\s*[\d.in]", broken):  # as C++ reads it, which Triton has: a sign may stand apart
            assert same(found.config, parsed(re.sub(r"-\n\s*", "-", broken))), broken
        else:
            assert errors(found) and all(where.startswith(":") for where, _ in errors(found)), broken
    else:
        assert errors(found) or same(found.config, theirs), broken


@pytest.mark.nightly
def test_the_fields_are_those_of_tritonclient() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient is not installed")
    matched: dict[str, Any] = {}

    def compare(ours: type, descriptor: Any) -> None:
        if ours.__name__ in matched:
            return
        matched[ours.__name__] = descriptor
        fields = {f.name: f for f in descriptor.fields}
        assert set(fields) == set(specs(ours)), ours.__name__
        for name, spec in specs(ours).items():
            field = fields[name]
            assert field.number == spec.number, name
            oneof = field.containing_oneof.name if field.containing_oneof else ""
            assert oneof == spec.oneof, name
            inner, kind = spec, field
            if spec.kind == "map":
                assert field.message_type.GetOptions().map_entry
                inner, kind = spec.value_type, field.message_type.fields_by_name["value"]
                key = field.message_type.fields_by_name["key"]
                assert spec.key is not None and key.type == getattr(key, f"TYPE_{spec.key.kind.upper()}")
            assert kind.type == getattr(kind, f"TYPE_{inner.kind.upper()}"), name
            if inner.kind == "enum":
                assert {v.name: v.number for v in kind.enum_type.values} == {e.name: e.value for e in inner.value_type}
            if inner.kind == "message":
                compare(inner.value_type, kind.message_type)

    compare(ModelConfig, theirs.ModelConfig.DESCRIPTOR)
    assert set(matched) == set(messages())


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("max_batch_sizes: 8", ":1:1", '"max_batch_sizes" is no field of a configuration'),
        ("\n  input [\n\t{ nmae: 'x' }\n]", ":3:4", '"nmae" is no field of input'),
        ("response_cache {\n  enabled: 4 }", ":2:3", '"enabled" is no field of response_cache'),
        ("max_batch_size: '8'", ":1:17", "'8' for max_batch_size"),
        ("max_batch_size: 8.0", ":1:17", "8.0 for max_batch_size"),
        ("max_batch_size: 2147483648", ":1:17", "2147483648 for max_batch_size"),
        ("max_batch_size: -2147483649", ":1:17", "-2147483649 for max_batch_size"),
        ("max_batch_size: [8]", ":1:17", "a list for max_batch_size"),
        ("max_batch_size { }", ":1:16", "a block for max_batch_size"),
        ("max_batch_size 8", ":1:16", "found 8"),
        ("name: a", ":1:7", "a for name"),
        ("name: '\\xff'", ":1:7", "'\\xff' for name"),
        ("input: 3", ":1:8", "3 for input"),
        ("input { data_type: FP32 }", ":1:20", "FP32 for data_type"),
        ("input { dims: [1, 2.5] }", ":1:19", "2.5 for dims"),
        ("name: 'a'\nname: 'b'", ":2:1", "name a second time; it stands in line 1"),
        ("optimization {}\noptimization {}", ":2:1", "optimization a second time; it stands in line 1"),
        ("dynamic_batching {}\nsequence_batching {}", ":2:1", "sequence_batching beside dynamic_batching of line 1"),
        ("parameters { key: 'a' valu: {} }", ":1:23", '"valu" is no part of parameters'),
        ("parameters { key: 1 }", ":1:19", "1 for key"),
        ("parameters: 'a'", ":1:13", "'a' for parameters"),
        ("response_cache { enable: yes }", ":1:26", "yes for enable"),
        ("name: 'a", ":1:7", "a string without an end"),
        ("name: 'a\n'", ":1:7", "a string without an end"),
        ("name: '\\ud800'", ":1:8", "the escape \\ud800"),
        ("# é\n\u00e9", ":2:1", "the character 'é'"),
        ("input {\n", ":2:1", "the file ends"),
        ("input { name: 'a' >", ":1:19", "found >"),
        ("max_batch_size: 12ab", ":1:17", "12ab is no number"),
        ("max_batch_size: 099", ":1:17", "099 for max_batch_size"),
        ("max_batch_size: - ", ":1:19", "the file ends"),
        ("[a.b]: 1", ":1:1", "found ["),
        ("name: 'a'\0", ":1:10", "the character '\\x00'"),
        ("max_batch_size: 1__", ":1:17", "1__ is no number"),
    ],
)  # fmt: skip
def test_where_and_what(text: str, where: str, what: str) -> None:
    assert errors(read(text))[:1] == [(where, what)]
    with pytest.raises(text_format.ParseError):  # so that we refuse nothing which is right
        parsed(text)


def test_what_protobuf_takes_and_we_do_not() -> None:
    """A number that is no word of an enumeration; an escape that Python's reader leaves as it is."""
    assert errors(read("input { data_type: 15 }")) == [(":1:20", "15 for data_type")]
    assert errors(read("name: '\\q'")) == [(":1:8", "the escape \\q")]
    assert errors(read("name: 'a\\400'")) == [(":1:9", "the escape \\400")], "a byte is at most \\377"


def test_what_is_probably_meant() -> None:
    found = read("max_batchsize: 8 input { data_type: TYPE_FLOAT32 }")
    assert [p.expected for p in found.problems] == ['did you mean "max_batch_size"?', 'did you mean "TYPE_FP32"?']
    found = read("input { data_type: FP32 } instance_group { kind: CPU }")  # as they are called over the network
    assert [p.expected for p in found.problems] == ['did you mean "TYPE_FP32"?', 'did you mean "KIND_CPU"?']


def test_what_may_be_written_otherwise() -> None:
    """C++'s reader takes these, Python's does not: a sign apart from its number, a byte order mark, octal numbers."""
    found = read("\ufeffmax_batch_size: 010\ninput { dims: - 1 data_type: 11 }\n")
    assert errors(found) == [] and found.config.max_batch_size == 8
    assert found.config.input[0].dims == (-1,) and found.config.input[0].data_type is DataType.TYPE_FP32


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = read("nam: 'a'\nmax_batch_size: x\ninput { dimms: 1 }\noutput { dims: 'a' name: 'o' }")
    assert [where for where, _ in errors(found)] == [":1:1", ":2:17", ":3:9", ":4:16"]
    assert found.config.output[0].name == "o", "what is right is read all the same"
    many = read("cc_model_filenames {}\n" + "parameters {}\n" * 1000 + "x: 1\n" * 1000).problems
    assert [sum(p.level is level for p in many) for level in Level] == [MAX_PROBLEMS + 1, MAX_PROBLEMS + 1, 1]
    assert many[-1].what == "more than 50 such" and many[-1].level is Level.ERROR, "warnings do not hide errors"


each_thing = pytest.mark.parametrize("text", ["x:1 ", "input{}", "dims:", "parameters{key:'a'}", "name:'a'"])


@pytest.mark.timing
@each_thing
def test_a_file_full_of_something(text: str) -> None:
    """1 MiB of the first took 20 s when each unknown name was compared with all that are known."""
    started = time.thread_time()
    read(text * (50_000 // len(text)))
    assert time.thread_time() - started < 1


@each_thing
def test_a_file_full_of_something_takes_time_in_proportion(text: str) -> None:
    """Of 16 times the size, what is compared with all that was read before takes 256 times as long."""

    def took_s(size: int) -> float:
        started = time.thread_time()
        read(text * (size // len(text)))
        return time.thread_time() - started

    few, many = (min(took_s(size) for _ in range(2)) for size in (5_000, 80_000))
    assert many < 64 * few


def test_a_key_of_a_map_a_second_time() -> None:
    text = "parameters { key: 'a' value { string_value: '1' } }\nparameters { key: 'a' value { string_value: '2' } }"
    found = read(text)
    assert same(found.config, parsed(text)) and found.config.parameters["a"].string_value == "2"
    (problem,) = found.problems
    assert problem.level is Level.WARNING and problem.location == "m/config.pbtxt:2:12" and "line 1" in problem.what


def test_places_of_what_was_read() -> None:
    found = read("input [\n  { name: 'a' dims: [ 1,\n 2 ] }, {}\n]\nparameters { key: 'k' value {} }")
    at = {path: (place.line, place.column) for path, place in found.places.items()}
    assert at[("input",)] == (1, 1) and at[("input", 1)] == (3, 9)
    assert at[("input", 0, "dims")] == (2, 15) and at[("input", 0, "dims", 1)] == (3, 2)
    assert at[("parameters", "k")] == (5, 12)
    missing = found.place(("input", 0, "data_type"))
    assert missing is not None and (missing.line, missing.column) == (2, 3), "what is not there: its owner"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"a" * (64 << 20), "more than 262,144 bytes"),
        (b"input {" * 10_000, "more than 32 blocks in one another"),
        (b"max_batch_size: " + b"9" * 200_000, "a number of 200,000 characters"),
        (b"model_metrics{metric_control{histogram_options{buckets: 1e999}}}", "1e999 for buckets"),
        (b"name: '" + b"a" * 200_000, "a string without an end"),
        (b"name: '" + b"\\" * 200_001, "a string without an end"),
        (b"name: " + b"'a'" * 50_000 + b"'", "a string without an end"),
        (b"\0" * 1000, "the character '\\x00'"),
        (b"name: '\xff'", "byte 0xff is not UTF-8"),
        (b"x:[" * 30_000, "found :"),
        (b"[" * 30_000, "found ["),
        (b"#" * 200_000 + b"\n}", "found }"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_hostile_files(text: bytes, what: str) -> None:
    started = time.process_time()
    found = read(text)
    assert len(found.problems) == 1 and found.problems[0].what == what
    assert time.process_time() - started < 5, "what it costs grows with the file"
