"""Level `full`: launches held against the tree's report."""

import json
from dataclasses import replace

import pytest

from toolkit.acceptance import Settings, compare_reports, measure, measurement_from_json, with_results
from toolkit.acceptance.launch import main
from toolkit.acceptance.report import Report, write_json
from toolkit.acceptance.runner import open_session
from toolkit.errors import ToolkitError


def settings(url):
    return Settings(url=url).model_copy(update={"max_new_tokens": 9})


@pytest.fixture
def launch(serve):
    """Measures a stub with the given faults against `reference`."""

    def start(reference=None, **faults):
        return measure(settings(serve(**faults).url), reference=reference)

    return start


@pytest.fixture
def report(serve):
    """The part of a tree's report that comparisons use, measured on a sound server."""
    server = serve(chain_accepts=2)
    with open_session(settings(server.url)) as session:
        session.endpoint.detect()
        outputs = [list(output.tokens) for output in session.chain.outputs]
        length = {"chain": {"value": session.chain.acceptance_length.value}}
        prompts = {"sha256": session.prompts_hash}
    return Report(
        "accepted", (), False, False, "acceptance", "full", "", 0.0, {}, (),
        acceptance_length=length, outputs={"chain": outputs}, prompts=prompts,
    )  # fmt: skip


def test_equal_launches_pass(report, launch):
    linear = launch(report, algorithm="DFLASH", tree_accepts=2)
    chain = launch(report, tree_accepts=2)
    results = compare_reports(report, linear, chain)
    assert [result.name for result in results] == [
        "relaunched_chain", "relaunched_chain_acceptance", "linear_dflash", "linear_dflash_acceptance",
    ]  # fmt: skip
    assert {result.status for result in results} == {"passed"}, results
    assert with_results(report, results, required=["relaunched_chain"]).accepted


def test_a_launch_with_wrong_tokens_is_refused(report, launch):
    wrong = launch(report, repeat_every=5)
    assert wrong.judged["status"] == "failed"
    results = compare_reports(report, launch(report, tree_accepts=2), replace(wrong, acceptance_length=None))
    assert [result.status for result in results] == ["failed", "not_checked", "passed", "passed"]
    judged = with_results(report, results)
    assert not judged.accepted
    assert judged.correctness_failed
    assert "16 outputs differ" in judged.reasons[0]


def test_differences_that_nobody_judged_fail(report, launch):
    wrong = launch(None, repeat_every=5)
    assert wrong.judged is None
    assert compare_reports(report, wrong, wrong)[0].status == "failed"


def test_a_launch_that_accepts_otherwise_is_worse(report, launch):
    other = launch(report, tree_accepts=4)
    results = compare_reports(report, other, other)
    assert [result.status for result in results] == ["passed", "failed", "passed", "failed"]
    judged = with_results(report, results)
    assert (judged.accepted, judged.correctness_failed, judged.performance_failed) == (False, False, True)


def test_other_prompts_are_not_compared(report, launch):
    other = replace(launch(report), prompts="0" * 64)
    assert compare_reports(report, other, other)[0].status == "not_checked"
    results = compare_reports(report, other, other)
    assert not with_results(report, results, required=["relaunched_chain"]).accepted


def test_an_earlier_refusal_stands(report, launch):
    fine = launch(report, tree_accepts=2)
    refused = replace(report, verdict="refused", reasons=("before",), correctness_failed=True)
    judged = with_results(refused, compare_reports(report, fine, fine))
    assert (judged.verdict, judged.reasons, judged.correctness_failed) == ("refused", ("before",), True)


def test_a_measurement_survives_json(report, launch):
    measured = launch(report)
    assert measurement_from_json(json.loads(json.dumps(measured.to_json()))) == measured
    with pytest.raises(ToolkitError, match="no measurement"):
        measurement_from_json({"colour": 1})


def test_the_programs(report, serve, tmp_path, capsys):
    write_json(tmp_path / "report.json", report.to_json())
    common = ["--report", str(tmp_path / "report.json"), "--settings", str(tmp_path / "settings.json")]
    for name, faults in (("dflash", {"algorithm": "DFLASH"}), ("chain", {})):
        server = serve(tree_accepts=2, **faults)
        (tmp_path / "settings.json").write_text(json.dumps({"url": server.url}))
        assert main(["measure", *common, "--out", str(tmp_path / f"{name}.json")]) == 0
    launches = [f"--launch={name}={tmp_path / name}.json" for name in ("dflash", "chain")]
    out = tmp_path / "judged.json"
    assert main(["compare", *common, *launches, "--out", str(out)]) == 1  # 65 tokens against 9
    assert "other lengths" in json.loads(out.read_text())["reasons"][0]
    assert main(["compare", *common, launches[0], "--out", str(out)]) == 2
    assert "--launch chain=FILE is missing" in capsys.readouterr().err
    (tmp_path / "chain.json").write_text("{")
    assert main(["compare", *common, *launches, "--out", str(out)]) == 2
    (tmp_path / "settings.json").write_text('{"url": "http://127.0.0.1:9"}')
    assert main(["measure", *common, "--out", str(out)]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
