"""What answers say against each other, or beside what makes no use of it: refused before anything is computed."""

from millrace.errors import ConfigError, nearest
from millrace.report.format_numbers import exact
from millrace.settings import Settings
from millrace.size.answer.sizing import PPS, TPS
from millrace.size.load.peak_load import WORDS_A_TOKEN
from millrace.size.load.token_lengths import PARTS
from millrace.size.performance.hardware import THIS
from millrace.size.performance.operating_point import SYSTEM
from millrace.size.performance.roofline_cost import WEIGHT_BYTES
from millrace.size.question.question import Question
from millrace.size.question.settings import SEARCH_S, HardwareSettings, LimitSettings, RequestSettings

_LENGTHS = ("input", "output", "system", "documents", "history", "question")


def check_question(question: Question) -> None:
    """By what was answered alone, without a look at files, models or devices. raises ConfigError"""
    _check_request(question.request)
    _check_limits(question.limits)
    _check_hardware(question.hardware)
    _check_search(question)
    _check_answered(question)


def _check_answered(question: Question) -> None:
    """All that lacks at once; where it is one answer alone, what reads it says more of it."""
    asked, load, limits, h = question.request, question.load, question.limits, question.hardware

    def given(of: Settings, *names: str) -> bool:
        return any(getattr(of, name) is not None for name in names)

    known = load.trace is not None or asked.preset is not None  # the lengths
    answered = {
        "which model (--model)": given(asked, "model") or given(h, "measured", "profile"),
        "how long a prompt is (--isl, --input)": known or given(asked, "isl", "input", *PARTS),
        "how long an answer is (--osl, --output)": known or given(asked, "osl", "output"),
        "how many requests come (--rate, --users, --calls)":
            given(load, "rate", "average", "users", "calls", "trace") or given(h, "systems"),
        "what users may wait for (--ttft-ms, --mode offline)":
            limits.mode == "offline" or given(limits, "ttft_ms", "itl_ms", "e2e_ms", "reading"),
    }  # fmt: skip
    missing = [what for what, is_known in answered.items() if not is_known]
    if len(missing) > 1:
        raise ConfigError(f"not said: {'; '.join(missing)}", "an answer to each",
                          "say them, or `millrace size` alone, which asks in a terminal")  # fmt: skip


def _check_request(asked: RequestSettings) -> None:
    given = [name for name in ("isl", "osl", *_LENGTHS) if getattr(asked, name) is not None]
    answers = [name for name in given if name in ("osl", "output")]
    if asked.preset is not None and answers and answers != given:
        raise ConfigError(f"--preset {asked.preset} beside {' and '.join(given)}, which leave it nothing to say",
                          "one of both", "leave --preset out, or some of the others")  # fmt: skip
    texts = [text.casefold() for name in _LENGTHS if (text := getattr(asked, name)) is not None]
    if asked.words_a_token != WORDS_A_TOKEN and not any("word" in text or "char" in text for text in texts):
        raise ConfigError("--words-a-token, and no length is in words", '--input "3500 words"',
                          "say a length in words, or leave it out")  # fmt: skip


def _check_limits(asked: LimitSettings) -> None:
    if asked.ttft_ms is not None and asked.e2e_ms is not None and asked.ttft_ms > asked.e2e_ms:
        raise ConfigError(f"{exact(asked.ttft_ms)} ms for the first token, and {exact(asked.e2e_ms)} for the last",
                          "the first before the last", "correct --ttft-ms or --e2e-ms")  # fmt: skip


def _check_hardware(asked: HardwareSettings) -> None:
    is_computed = asked.measured is None and asked.profile is None
    for name in asked.precision:
        if is_computed and name not in WEIGHT_BYTES:
            raise ConfigError(f"--precision {name:.40}", nearest(name, WEIGHT_BYTES), "choose one of them")
    if is_computed and asked.tp not in (None, *TPS):
        raise ConfigError(
            f"--tp {asked.tp}", f"{', '.join(map(str, TPS))}: heads are cut into equal parts, and what links take was "
            "fitted to these", "choose one of them (--measured takes any)",
        )  # fmt: skip
    if asked.pp not in (None, *PPS):
        raise ConfigError(f"--pp {asked.pp}", ", ".join(map(str, PPS)), "choose one of them")
    if asked.pp not in (None, 1) and not is_computed:
        by = "--measured" if asked.measured is not None else "--profile"
        raise ConfigError(f"--pp {asked.pp} with {by}", "instances as they were measured, which are of one stage",
                          "leave one out")  # fmt: skip
    here = {
        "pp": asked.pp not in (None, 1),
        "system-size": asked.system_size != SYSTEM,
        "tp": asked.tp not in (None, 1),
    }
    if is_computed and asked.hardware and all(name.casefold() == THIS for name in asked.hardware):
        for flag in (name for name, is_said in here.items() if is_said):
            raise ConfigError(f"--{flag} with --hardware {THIS}", "this machine, which is one device",
                              f"leave --{flag} out")  # fmt: skip


def _check_search(question: Question) -> None:
    """What simulations alone make use of, where there are none."""
    search, limits, hardware = question.search, question.limits, question.hardware
    routed = None if search.routing == "blind" else f"--routing {search.routing}"
    without = {"--no-simulate": not search.simulate, "--measured": hardware.measured is not None}
    needing = {
        routed: routed is not None, "--arrivals gamma": limits.arrivals == "gamma",
        "--search-s": search.search_s != SEARCH_S,
    }  # fmt: skip
    for by in (name for name, is_so in without.items() if is_so):
        for flag in (name for name, is_so in needing.items() if is_so):
            raise ConfigError(f"{flag} with {by}", "what is simulated", "leave one out")
    if routed is not None and limits.arrivals == "closed":
        raise ConfigError(f"{routed} with --arrivals closed", "what is simulated behind a router", "leave one out")
    if search.routing == "prefix-aware" and ">" in (question.request.pipeline or ""):
        raise ConfigError(f"{routed} with --pipeline", "requests of one call: nothing says which calls begin alike",
                          "choose --routing least-loaded, or leave --pipeline out")  # fmt: skip
    if limits.of == "p95" and not search.simulate and hardware.measured is None and limits.mode != "offline":
        raise ConfigError("limits are on the p95, which a closed form does not know, and --no-simulate",
                          "one of both", "leave --no-simulate out, or ask with --of mean")  # fmt: skip
