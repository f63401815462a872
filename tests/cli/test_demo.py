"""`millrace demo`: the whole journey, as its report tells it."""

import json
import math

import pytest

from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores
from tests.cli.conftest import Millrace


@pytest.mark.parametrize("most", [math.inf, pytest.param(1, marks=pytest.mark.timing)], ids=["busy", "idle"])
def test_the_report_adds_up(millrace: Millrace, measured: list[tuple[str, int]], most: float) -> None:
    """most: of the limit, which is found in other moments than the speed: beside other work it may be below that"""
    result = millrace("demo", "--json")
    assert result.code == 0, result.err
    assert measured == [(usable_isas()[0], usable_cores())]
    told = json.loads(result.out)
    assert told["answer"] and told["engine"]["model"] == "tiny"
    assert 0 < told["ttft_s"]["p50"] <= told["ttft_s"]["p99"]
    assert 0 < told["inter_token_s"]["p50"] <= told["inter_token_s"]["p99"]
    assert told["inter_token_s"]["p50"] <= told["pause_s"]["p99"]
    load = told["load"]
    assert told["tokens_per_s"] == load["requests"] * load["tokens_each"] / load["seconds"]
    assert 0 < told["share_of_limit"] < most and 0 < told["engine_share_of_limit"] < most
    assert told["limit"]["bound_by"] in ("reading from L2", "reading from L3", "reading from DRAM", "bf16 arithmetic")


def test_it_is_said_to_people_too(millrace: Millrace, measured: list[tuple[str, int]]) -> None:
    result = millrace("demo")
    assert len(measured) == 1 and result.code == 0, result.err
    for said in ("you ", "tiny ", "What was built", "first token", "next token", "limit here", "Where to go next"):
        assert said in result.out
