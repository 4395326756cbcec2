"""Where a rollback goes, and where it goes only if that is asked for; releases, but no server."""

import shutil
from dataclasses import replace

import pytest

from tests.deploy.conftest import Site
from toolkit.deploy.rollback import rollback_target
from toolkit.deploy.summary import next_lines
from toolkit.errors import ConfigError
from toolkit.files import json_bytes
from toolkit.profile.loading import load_profile
from toolkit.release import history
from toolkit.release.host import ServiceHost
from toolkit.release.locate import layout_of
from toolkit.release.store import Release


def host_of(site: Site) -> ServiceHost:
    return ServiceHost(layout_of(load_profile(str(site.profile)).profile), "local")


def other(host: ServiceHost) -> Release:
    """A second release, which is not current."""
    current = host.store.current()
    assert current is not None
    name = host.store.new_id("e" * 64)
    unit = replace(current.unit, release=name)
    return host.store.stage(name, profile=current.profile, unit=unit, manifest=current.manifest)


def entry(host: ServiceHost, release: Release, kind: str, outcome: str, reason: str = "") -> None:
    said = history.Entry(
        id=f"{kind}-{release.id}",
        kind=kind,
        outcome=outcome,
        who="ann@desk",
        release=release.id,
        reason=reason,
        when="2026-11-30T04:12:55+00:00",
    )
    history.append(host.paths, said)


def test_a_refused_release_is_gone_to_only_where_that_is_said(staged: Site) -> None:
    host = host_of(staged)
    current, refused = host.store.current(), other(host)
    assert current is not None
    entry(host, current, "deploy", "committed")
    entry(host, refused, "swap", "rolled_back", "performance: 2.9 is too little")
    shown = staged.run("rollback", "--to", refused.id)
    assert shown.returncode == 2
    assert shown.stderr == (
        f"error: {refused.id} was refused: its swap by ann@desk was rolled back at 2026-11-30 04:12:55Z: "
        "performance: 2.9 is too little\n"
        f"  next: ddtoolkit rollback local --to {refused.id} --refused goes there all the same, judged by "
        "its own thresholds alone\n"
    )
    assert rollback_target(host, current, refused.id, refused=True) == refused
    # None served before: a plain rollback picks no refused one, and cannot be made to.
    with pytest.raises(ConfigError, match="no release that served before"):
        rollback_target(host, current, None)
    shown = staged.run("rollback", "--refused")
    assert (shown.returncode, "--refused is for a release that --to names" in shown.stderr) == (2, True)


def test_a_release_that_was_removed_is_told_apart_from_one_that_never_was(staged: Site) -> None:
    host = host_of(staged)
    current, gone = host.store.current(), other(host)
    assert current is not None
    entry(host, gone, "deploy", "committed")
    shutil.rmtree(gone.path)
    shown = staged.run("rollback", "--to", gone.id)
    assert shown.returncode == 2
    assert shown.stderr == (
        f"error: {gone.id} is in the history, but kept no longer (service.keep_releases)\n"
        f"  next: these are there: {current.id}; a deploy of its profile makes it anew\n"
    )
    never = "20260101T000000Z-00000000"
    assert staged.run("rollback", "--to", never).stderr.startswith(f"error: no release {never} in ")


def test_without_its_history_the_report_tells_why_it_was_refused(staged: Site) -> None:
    host = host_of(staged)
    current, refused = host.store.current(), other(host)
    assert current is not None
    report = {"started": "2026-11-30T04:12:00+00:00", "reasons": ["lossless: position 3", "too slow"]}
    (refused.path / "acceptance.refused.json").write_bytes(json_bytes(report))
    said = r"its acceptance of 2026-11-30T04:12:00\+00:00 refused it: lossless: position 3; too slow"
    with pytest.raises(ConfigError, match=said):
        rollback_target(host, current, refused.id)
    (refused.path / "acceptance.refused.json").write_text("[")
    with pytest.raises(ConfigError, match="an unknown time refused it: its report gives no reason"):
        rollback_target(host, current, refused.id)


def test_a_damaged_report_is_shown_as_far_as_it_goes(staged: Site) -> None:
    current = host_of(staged).store.current()
    assert current is not None
    report = {"verdict": "accepted", "acceptance_length": [1], "tokens_per_second": "x"}
    for value in (report, report | {"acceptance_length": {"tree": {"value": None}, "chain": {"value": 2.5}}}):
        checks = [{"name": ["x"], "status": "not_judged"}, 5]
        (current.path / "acceptance.json").write_bytes(json_bytes(value | {"checks": checks}))
        shown = staged.run("status")
        assert shown.returncode == 0, shown.stderr
    assert "accepted, None, acceptance length 2.50 (chain), not judged: ['x']" in shown.stdout


def test_what_was_accepted_once_is_no_refused_release(staged: Site) -> None:
    host = host_of(staged)
    current, earlier = host.store.current(), other(host)
    assert current is not None
    entry(host, earlier, "deploy", "committed")
    # A later rollback to it that came to nothing, such as for a port in use, takes nothing of that.
    entry(host, earlier, "rollback", "rolled_back", "port 30000 is in use")
    assert rollback_target(host, current, earlier.id) == earlier


def test_after_a_rollback_the_way_forward_is_told(staged: Site) -> None:
    """What served after the release that was returned to is not gone back to unnamed, but is named."""
    host = host_of(staged)
    current, later = host.store.current(), other(host)
    assert current is not None
    entry(host, current, "deploy", "committed")
    entry(host, later, "swap", "committed")
    entry(host, current, "rollback", "committed")
    shown = staged.run("rollback")
    assert shown.returncode == 2
    assert f"next: ddtoolkit rollback local --to {later.id} goes to one that served after it" in shown.stderr


def test_a_rollback_is_a_next_step_only_where_it_has_somewhere_to_go(staged: Site) -> None:
    host = host_of(staged)
    current, earlier = host.store.current(), other(host)
    assert current is not None
    entry(host, current, "deploy", "committed")
    told = "\n".join(next_lines(host, changed=True))
    assert "history local" in told
    assert "rollback" not in told
    host.paths.history.unlink()
    entry(host, earlier, "deploy", "committed")
    entry(host, current, "deploy", "committed")
    assert "rollback local" in "\n".join(next_lines(host, changed=True))
