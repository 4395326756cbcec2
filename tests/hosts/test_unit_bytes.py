"""Arguments and environments reach a process under a real systemd byte for byte (field cases R1 to R3).

A thousand cases by default; DDTOOLKIT_UNIT_CASES asks for more, which benchmarks/unit_bytes.py records.
"""

import os

import pytest

from tests.hosts import unit_bytes

COUNT = int(os.environ.get("DDTOOLKIT_UNIT_CASES", "1000"))
SEED = 20240


@pytest.mark.timeout(60 + COUNT // 20)
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_every_process_gets_its_bytes(make_host, release):
    cases = unit_bytes.cases(COUNT, SEED)
    found = list(unit_bytes.differences(make_host(release), cases))
    assert not found, "\n".join([f"{len(found)} of {COUNT} cases differ", *found[:3]])


def test_the_sample_holds_what_is_awkward():
    values = [
        value for case in unit_bytes.cases(1000, SEED) for value in (*case.words, *case.environment.values())
    ]
    assert {"", ";", "$", "%", "\\", "#"} <= set(values)
    assert {chr(code) for code in range(ord(" "), 0x7F)} <= set("".join(values))
    for piece in ("\t", "%s", "${X}", "\\x41", '"', "'", "\u2028", "é", "u?options=-c search_path=app"):
        assert sum(piece in value for value in values) >= 10


def test_a_difference_is_seen():
    case = unit_bytes.Case(("a b",), {"V": "w"})
    got = b"/bin/sh\0" + unit_bytes.DUMP.encode() + b"\x007\0a b\0PATH=/bin\0LANG=C.UTF-8\0V=w\0"
    assert unit_bytes.difference(7, case, got) is None
    assert "did not run" in unit_bytes.difference(7, case, None)
    assert "arguments" in unit_bytes.difference(7, case, got.replace(b"a b\0", b"a\0b\0"))
    for wrong in (got.replace(b"V=w", b"V=x"), got.replace(b"V=w\0", b""), got + b"MORE=1\0"):
        assert "environment" in unit_bytes.difference(7, case, wrong)
