"""What `status` tells of the report that a release was accepted with."""

import json

from changes import change

from toolkit.deploy.watch import describe_status
from toolkit.release.view import status


def test_a_figure_that_was_not_judged_is_told(service):
    first = service.stage("one")
    change(service, "deploy", first)
    checks = [{"name": "tokens_per_second", "status": "not_judged"}, {"name": "lossless", "status": "passed"}]
    report = {"verdict": "accepted", "started": "2026-01-01T00:00:00Z", "tokens_per_second": 9}
    report["checks"] = checks
    (first.path / "acceptance.json").write_text(json.dumps(report))
    shown = status(service.layout, service.name)
    assert shown.accepted["not_judged"] == ["tokens_per_second"]
    told = dict(describe_status(shown.to_json()))["accepted"]
    assert told == "accepted, 2026-01-01T00:00:00Z, 9 tokens/s, not judged: tokens_per_second"
