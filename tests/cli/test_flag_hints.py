"""Flags of other programs, typed by habit: each gets an answer of its own, and none is read as another flag."""

import click
import pytest

from millrace.cli.bench import compare_options, infer_options, sweep_options
from millrace.cli.flag_aliases import hint
from millrace.cli.flag_hints import BUILD, ENGINE, LOAD, LOCAL, SAME, SERVER, TENSORS, FlagKind
from millrace.cli.main import COMMANDS, cli
from tests.cli.conftest import Millrace

HABITS = {
    ("serve", "tiny"): "--chat-template=x --seed --enable-lora --speculative-config={} --generation-config=vllm"
    " --override-generation-config --task --runner --hf-overrides --async-scheduling --limit-mm-per-prompt"
    " --response-role -pp -dp -tp -fa -np -ngl --backend --max_beam_width --tool_parser --custom_tokenizer"
    " --gpus_per_node --cluster_size --num_postprocess_workers --metadata_server_config_file --keepalive --temp"
    " --max_num_tokens --block-size --load-format",
    ("chat", "tiny"): "--verbose --keepalive --format --think --hidethinking --nowordwrap -s -p -n -ngl",
    ("generate", "tiny"): "-np -pp -ngl --temp --nowordwrap",
    ("bench", "URL"): "--service-kind --tokenizer --measurement-interval --stability-percentage --profile-export-file"
    " --output-tokens-mean-deterministic --generate-plots --num-dataset-entries --dataset-name --backend --base-url"
    " --percentile-metrics --save-result --api-key",
    ("bench", "sweep", "URL"): "--service-kind --measurement-interval --backend",
    (
        "bench",
        "infer",
        "URL",
    ): "--shared-memory --percentile --async --streaming -f --collect-metrics -p -s --service-kind",
    ("build", "tiny", "-o", "e"): "--gemm_plugin --max_num_tokens --workers --checkpoint_dir --tp_size",
    ("size",): "-tp -pp --gpus --max-model-len=4",
}
OWN = ("did you mean", "not needed: ", "not supported: ", "leave it out: ", "the field ")


@pytest.mark.parametrize("command", HABITS, ids=" ".join)
def test_a_habit_has_an_answer_of_its_own(millrace: Millrace, command: tuple[str, ...]) -> None:
    for flag in HABITS[command].split()[: -1 if command == ("size",) else None]:
        result = millrace(*command, *flag.split("="))
        result.assert_mistake(f"there is no option {flag.partition('=')[0]}\n")
        expected = result.err.split("expected: ")[1]
        assert expected.startswith(OWN), f"{flag}: {result.err}"


@pytest.mark.parametrize(
    "line, expected",
    [
        ("serve tiny -tp 1", "leave it out: a model runs on one device"),
        ("serve tiny -tp=2", "not supported: a model runs on one device"),
        ("serve tiny --tensor_parallel_size 1", "leave it out: a model runs on one device"),
        ("serve tiny --tensor-parallel-size=2", "not supported: a model runs on one device"),
        ("serve tiny --load-format auto", "leave it out: the files"),
        ("serve tiny --load_format=dummy", "did you mean --random-weights?"),
        ("serve tiny --max_num_tokens 8192", "not needed: how many tokens a step computes"),
        ("serve tiny --block-size 16", "not needed: pages"),
        ("serve tiny --backend pytorch", "leave it out"),
        ("serve tiny --max_beam_width 1", "leave it out"),
        ("serve tiny --no-enable-chunked-prefill", "not supported: it cannot be turned off"),
        ("serve tiny --no-enable-lora", "leave it out"),
        ("serve tiny --seed 1", "the field seed of a request"),
        ("serve tiny -ngl 0", "leave it out: the CPU"),
        ("serve tiny -ngl 99", "did you mean --device cuda?"),
        ("chat tiny --seed=1 --temp 0", "did you mean --temperature?"),
        ("bench URL --service-kind triton", "did you mean --endpoint generate?"),
        ("bench URL --backend vllm", "leave it out"),
        ("bench URL --api-key k", 'did you mean --header "authorization:Bearer KEY"?'),
        ("bench infer URL -p 5000", "did you mean --duration-s? (it takes seconds"),
        ("size -tp 2", "did you mean --tp?"),
        ("serve tiny --port-number 3", "the nearest are --port, --grpc-port, --reuse-port, --metrics-port"),
        ("serve tiny --prot 3", 'did you mean "--port"?'),
        ("list --quiet", "one of: --json"),
        ("serve tiny -Z", "an option of this command"),
        ("serve tiny -zap", "an option of this command"),
    ],
)
def test_what_is_expected(millrace: Millrace, line: str, expected: str) -> None:
    millrace(*line.split()).assert_mistake(f"expected: {expected}")


def test_a_value_is_no_flag(millrace: Millrace) -> None:
    """What follows an option that takes a value, and what is behind --, belongs to it."""
    millrace("generate", "no-such-model", "-p", "-tp").assert_mistake("no-such-model")
    millrace("generate", "--", "no-such-model", "-tp").assert_mistake("no-such-model")
    millrace("generate", "tiny", "-n3", "--nothing").assert_mistake("--nothing")


def commands() -> dict[str, click.Command]:
    found = {name: cli.get_command(click.Context(cli), name) for name in COMMANDS}
    below = {"bench sweep": sweep_options, "bench compare": compare_options, "bench infer": infer_options}
    return {name: c for name, c in found.items() if c is not None} | {n: m.command for n, m in below.items()}


def options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize(
    "names, family",
    [
        (["serve"], SERVER), (["chat", "generate"], LOCAL), (["bench", "bench sweep", "bench compare"], LOAD),
        (["bench infer"], TENSORS), (["build"], BUILD), (["serve", "chat", "generate", "build", "eval"], ENGINE),
        ([*COMMANDS], {FlagKind.SAME: SAME}),
    ],
    ids=["serve", "chat", "bench", "infer", "build", "engines", "same"],
)  # fmt: skip
def test_the_tables_are_in_order(names: list[str], family: dict[FlagKind, dict[str, str]]) -> None:
    """A flag has one meaning in a table; what a table recommends exists, and what it knows as absent does not."""
    flags = [flag for groups in family.values() for text in groups.values() for flag in text.split()]
    twice = {flag for flag in flags if flags.count(flag) > 1}
    assert twice <= {"--gpus"}, twice  # --device, or --hardware of `millrace size`
    assert all(flag.startswith("-") and "_" not in flag.partition("=")[0] for flag in flags)
    known = [options(commands()[name]) for name in names]
    if family.get(FlagKind.SAME) is not SAME:
        everywhere = set.intersection(*known)
        assert not [flag for flag in flags if flag in everywhere], "a hint that nobody sees"
    for meaning in family.get(FlagKind.SAME, {}):
        target = meaning.replace(",", " ").split()[0]
        assert target in ("MODEL", "URL") or any(target in one for one in known), meaning


def test_every_flag_of_the_tables_is_answered() -> None:
    known = sorted(options(commands()["serve"]))
    for family in (SERVER, ENGINE):
        for groups in family.values():
            for flag in (flag for text in groups.values() for flag in text.split()):
                name, _, value = flag.partition("=")
                assert hint(name, value or None, known)[0].startswith(OWN), flag
