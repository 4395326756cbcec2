"""The whole acceptance: verdicts, reports, the command, its time limit, and what it never shows."""

import json
import re
import resource
import subprocess
import sys
import time

import pytest

from toolkit.acceptance import Settings, load_report, report_from_json, run_acceptance
from toolkit.acceptance.endpoint import Endpoint
from toolkit.acceptance.exchange import EndpointError
from toolkit.acceptance.report import judge, write_json
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.table import print_report
from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.schema import SecretRef

KEY = "s3cr3t-k3y-value"


def accept(url, tell=None, **changes):
    """A run with outputs too short to prove losslessness, but quick."""
    settings = Settings(url=url, requests=151, load_tokens=4)
    return run_acceptance(settings.model_copy(update={"max_new_tokens": 5, **changes}), tell)


def command(folder, settings, *extra):
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "toolkit.acceptance.run",
            "--settings",
            str(path),
            "--out",
            str(folder / "report.json"),
            *extra,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One run of the real command against a sound server."""
    from acceptance_stub import Stub

    folder = tmp_path_factory.mktemp("done")
    with Stub() as server:
        settings = {"url": server.url, "required": ["lossless"]}
        return folder, command(folder, settings, "--picture", str(folder / "picture.png"))


def test_a_sound_server_is_accepted(done):
    folder, process = done
    assert process.returncode == 0, process.stderr
    report = load_report(folder / "report.json")
    assert (report.accepted, report.reasons) == (True, ())
    assert not report.correctness_failed
    assert not report.performance_failed
    assert {check.status for check in report.checks} == {"passed"}
    assert report.acceptance_length["tree"]["value"] == pytest.approx(64 / 22, abs=1e-3)
    assert report.acceptance_length["chain"]["value"] == 2.0
    assert sum(report.acceptance_length["tree"]["histogram"]) > 0
    assert report.tokens_per_second > 0
    assert set(report.latency) == {"p50", "p90", "p99"}
    assert len(report.outputs["batch"]) == 16
    assert report.server["kind"] == "sglang"


def test_progress_is_one_json_object_a_line(done):
    _, process = done
    events = [json.loads(line) for line in process.stdout.splitlines()]
    assert [event["name"] for event in events if event["event"] == "result"][:2] == [
        "real_tokens",
        "lossless",
    ]
    assert events[-1]["event"] == "verdict"
    assert events[-1]["verdict"] == "accepted"


def test_the_table_is_plain_off_a_terminal(done):
    _, process = done
    assert "\x1b" not in process.stderr
    assert "tree_against_chain" in process.stderr
    assert "acceptance length, chain: 2.000" in process.stderr
    assert "accepted in" in process.stderr


def test_a_picture_is_drawn(done):
    folder, _ = done
    assert (folder / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_a_report_survives_json(done):
    folder, _ = done
    report = load_report(folder / "report.json")
    assert report_from_json(json.loads(json.dumps(report.to_json()))) == report


def test_a_faulty_server_is_refused_with_exit_1(tmp_path, serve):
    process = command(tmp_path, {"url": serve(silent_after=100).url})
    assert process.returncode == 1, process.stderr
    report = load_report(tmp_path / "report.json")
    assert not report.accepted
    assert report.correctness_failed
    assert re.search(r"503.* after 1\d\d answered requests", report.reasons[0])
    assert "refused in" in process.stderr


@pytest.mark.parametrize("settings", ["{", '{"url": "no url"}', '{"url": "http://h", "prompts": "/no/file"}'])
def test_unusable_settings_are_exit_2(tmp_path, settings):
    (tmp_path / "s.json").write_text(settings)
    process = subprocess.run(
        [sys.executable, "-m", "toolkit.acceptance.run", "--settings", "s.json", "--out", "r.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "r.json").exists()


def test_a_server_that_stops_answering_is_refused(serve):
    report = accept(serve(silent_after=120).url)
    assert report.verdict == "refused"
    assert "503" in report.reasons[0]
    assert len(report.reasons) == 1
    assert report.check("many_requests").status == "failed"
    assert report.check("metrics").status == "not_checked"


def test_a_server_that_hangs_is_refused_in_bounded_time(serve):
    start = time.monotonic()
    report = accept(serve(hang_after=40).url, request_timeout=0.5)
    assert report.verdict == "refused"
    assert "was not answered" in report.reasons[0]
    assert report.check("many_requests").status == "failed"
    assert time.monotonic() - start < 5


def test_the_time_limit_refuses(serve):
    start = time.monotonic()
    report = accept(serve(hang_after=5).url, time_limit=1.0)
    assert report.reasons[0] == "the time limit of 1 s was reached before every check was made"
    assert report.correctness_failed
    assert {check.status for check in report.checks[1:]} == {"not_checked"}
    assert time.monotonic() - start < 4


def test_nobody_there_is_a_refusal():
    report = accept("http://127.0.0.1:9")
    assert report.verdict == "refused"
    assert "127.0.0.1:9" in report.reasons[0]
    assert {check.status for check in report.checks} == {"not_checked"}


def test_a_required_check_must_be_shown(serve):
    report = accept(serve().url, required=("lossless",))
    assert report.verdict == "refused"
    assert report.reasons == (
        "lossless is required and inconclusive: outputs were too short: 32 positions alone, 64 in a batch",
    )


def test_an_experiment_gates_on_correctness_only(serve):
    events = []
    slow = serve(tree_accepts=1).url
    experiment = accept(slow, events.append, min_acceptance_length=2, mode="experiment")
    assert experiment.verdict == "accepted"
    assert experiment.performance_failed
    failed = {event["name"]: event.get("counts", True) for event in events if event.get("status") == "failed"}
    assert failed == {"tree_against_chain": False, "acceptance_length": False}
    assert accept(serve(wrong_in_batch=True).url, mode="experiment", max_new_tokens=9).verdict == "refused"


def test_a_performance_failure_is_told_apart(serve):
    report = accept(serve(tree_accepts=2).url, min_tokens_per_second=1e9, min_acceptance_length=1.5)
    assert report.verdict == "refused"
    assert report.performance_failed
    assert not report.correctness_failed
    assert report.check("acceptance_length").status == "passed"


def test_keys_go_by_header_and_are_never_shown(serve, monkeypatch, capsys):
    monkeypatch.setenv("ACCEPTANCE_KEY", KEY)
    server = serve(api_key=KEY)
    reference = SecretRef(env="ACCEPTANCE_KEY")
    report = accept(server.url, api_key=reference)
    assert report.verdict == "accepted", report.reasons
    print_report(report)
    refused = accept(server.url)
    assert "401" in refused.reasons[0]
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err + str(report) + str(refused)


def test_a_key_that_is_not_there_is_a_settings_fault(serve):
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        accept(serve().url, api_key=SecretRef(env="NO_SUCH_VARIABLE"))


def test_something_else_on_the_port(serve):
    report = accept(serve(dialect="none").url)
    assert report.verdict == "refused"
    assert "no inference server that is known" in report.reasons[0]


@pytest.mark.parametrize(
    ("dialect", "kind", "version"),
    [("sglang", "sglang", "0.5.17"), ("vllm", "vllm", "0.11.0"), ("openai", "openai", "")],
)
def test_servers_are_told_apart(serve, dialect, kind, version):
    with Endpoint(serve(dialect=dialect).url + "/v1/") as endpoint:
        identity = endpoint.detect()
    assert (identity.kind, identity.version, identity.model) == (kind, version, "toy")


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://h", "http://"])
def test_what_is_no_url(url):
    with pytest.raises(ToolkitError, match="no URL"):
        Endpoint(url)


def test_a_broken_stream_is_an_error(open_session):
    session = open_session(cut_stream=True, settings={"max_new_tokens": 13})
    with pytest.raises(EndpointError, match="broke off"):
        session.run(session.greedy(1), concurrency=1, way="native_stream")


def result(status, category="correctness", name="x"):
    return CheckResult(name, status, category, detail="why")


@pytest.mark.parametrize(
    ("results", "options", "verdict", "correctness", "performance"),
    [
        ([result("passed")], {}, "accepted", False, False),
        ([result("failed")], {}, "refused", True, False),
        ([result("failed")], {"experiment": True}, "refused", True, False),
        ([result("failed", "performance")], {}, "refused", False, True),
        ([result("failed", "performance")], {"experiment": True}, "accepted", False, True),
        ([result("inconclusive")], {}, "accepted", False, False),
        ([result("inconclusive")], {"required": ["x"]}, "refused", True, False),
        ([result("not_judged", "performance")], {}, "accepted", False, False),
        ([result("passed")], {"fault": "gone"}, "refused", True, False),
        ([result("failed"), result("failed")], {}, "refused", True, False),
    ],
)
def test_verdicts(results, options, verdict, correctness, performance):
    options = {"required": [], "experiment": False, "fault": None} | options
    found = judge(results, **options)
    assert found[0] == verdict
    assert bool(found[1]) == (verdict == "refused")
    assert found[2:] == (correctness, performance)
    assert len(set(found[1])) == len(found[1])


def test_a_full_disk_leaves_the_old_report(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, {"old": True})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ToolkitError, match="cannot be written"):
            write_json(path, {"new": "x" * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(path.read_text()) == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not JSON"), ("[]", "no schema"), ('{"schema": 2}', "schema 2"), ('{"schema": 1}', "damaged")],
)
def test_damaged_reports_are_named(tmp_path, text, words):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ToolkitError, match=words) as caught:
        load_report(path)
    assert str(path) in str(caught.value)


def test_markup_in_a_servers_words_is_shown_as_it_is(capsys, serve):
    report = accept(serve(failing_self_check=True).url)
    print_report(report)
    assert "mask is causal" in capsys.readouterr().err
