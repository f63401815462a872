"""Refuses contradictory and unused settings before anything is computed."""

from millrace.errors import ConfigError, nearest
from millrace.report.format_numbers import format_exact
from millrace.settings import Settings
from millrace.size.answer.sizing import PPS, TPS
from millrace.size.load.peak_load import WORDS_A_TOKEN
from millrace.size.load.token_lengths import PARTS
from millrace.size.performance.hardware import THIS
from millrace.size.performance.operating_point import SYSTEM
from millrace.size.performance.roofline_cost import WEIGHT_BYTES
from millrace.size.question.question import SizingQuestion
from millrace.size.question.settings import SEARCH_S, HardwareSettings, LimitSettings, RequestSettings

_LENGTHS = ("input", "output", "system", "documents", "history", "question")


def check_question(question: SizingQuestion) -> None:
    """Check the settings against each other, without reading files, models or devices. raises ConfigError"""
    _check_request(question.request)
    _check_limits(question.limits)
    _check_hardware(question.hardware)
    _check_search(question)
    _check_complete(question)


def _check_complete(question: SizingQuestion) -> None:
    """List all missing settings at once; a single missing one is reported by its reader, in more detail."""
    request, load, limits, h = question.request, question.load, question.limits, question.hardware

    def is_set(settings: Settings, *names: str) -> bool:
        return any(getattr(settings, name) is not None for name in names)

    lengths_known = load.trace is not None or request.preset is not None  # the lengths
    answered = {
        "which model (--model)": is_set(request, "model") or is_set(h, "measured", "profile"),
        "how long a prompt is (--isl, --input)": lengths_known or is_set(request, "isl", "input", *PARTS),
        "how long an answer is (--osl, --output)": lengths_known or is_set(request, "osl", "output"),
        "how many requests come (--rate, --users, --calls)":
            is_set(load, "rate", "average", "users", "calls", "trace") or is_set(h, "systems"),
        "what users may wait for (--ttft-ms, --mode offline)":
            limits.mode == "offline" or is_set(limits, "ttft_ms", "itl_ms", "e2e_ms", "reading"),
    }  # fmt: skip
    missing = [what for what, is_known in answered.items() if not is_known]
    if len(missing) > 1:
        raise ConfigError(f"not said: {'; '.join(missing)}", "an answer to each",
                          "say them, or `millrace size` alone, which asks in a terminal")  # fmt: skip


def _check_request(request: RequestSettings) -> None:
    names = [name for name in ("isl", "osl", *_LENGTHS) if getattr(request, name) is not None]
    answers = [name for name in names if name in ("osl", "output")]
    if request.preset is not None and answers and answers != names:
        raise ConfigError(f"--preset {request.preset} beside {' and '.join(names)}, which leave it nothing to say",
                          "one of both", "leave --preset out, or some of the others")  # fmt: skip
    texts = [text.casefold() for name in _LENGTHS if (text := getattr(request, name)) is not None]
    if request.words_a_token != WORDS_A_TOKEN and not any("word" in text or "char" in text for text in texts):
        raise ConfigError("--words-a-token, and no length is in words", '--input "3500 words"',
                          "say a length in words, or leave it out")  # fmt: skip


def _check_limits(settings: LimitSettings) -> None:
    if settings.ttft_ms is not None and settings.e2e_ms is not None and settings.ttft_ms > settings.e2e_ms:
        raise ConfigError(
            f"{format_exact(settings.ttft_ms)} ms for the first token, "
            f"and {format_exact(settings.e2e_ms)} for the last",
            "the first before the last",
            "correct --ttft-ms or --e2e-ms",
        )


def _check_hardware(settings: HardwareSettings) -> None:
    is_computed = settings.measured is None and settings.profile is None
    for name in settings.precision:
        if is_computed and name not in WEIGHT_BYTES:
            raise ConfigError(f"--precision {name:.40}", nearest(name, WEIGHT_BYTES), "choose one of them")
    if is_computed and settings.tp not in (None, *TPS):
        raise ConfigError(
            f"--tp {settings.tp}",
            f"{', '.join(map(str, TPS))}: heads are cut into equal parts, and what links take was fitted to these",
            "choose one of them (--measured takes any)",
        )
    if settings.pp not in (None, *PPS):
        raise ConfigError(f"--pp {settings.pp}", ", ".join(map(str, PPS)), "choose one of them")
    if settings.pp not in (None, 1) and not is_computed:
        by = "--measured" if settings.measured is not None else "--profile"
        raise ConfigError(f"--pp {settings.pp} with {by}", "instances as they were measured, which are of one stage",
                          "leave one out")  # fmt: skip
    here = {
        "pp": settings.pp not in (None, 1),
        "system-size": settings.system_size != SYSTEM,
        "tp": settings.tp not in (None, 1),
    }
    if is_computed and settings.hardware and all(name.casefold() == THIS for name in settings.hardware):
        for flag in (name for name, is_set in here.items() if is_set):
            raise ConfigError(f"--{flag} with --hardware {THIS}", "this machine, which is one device",
                              f"leave --{flag} out")  # fmt: skip


def _check_search(question: SizingQuestion) -> None:
    """Refuse settings of the simulation if nothing is simulated. raises ConfigError"""
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
