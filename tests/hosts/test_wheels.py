"""Wheels brought to a real host over SSH: cut connections, damaged files, a full disk."""

import threading
import time
from pathlib import Path

import pytest

from tests.build.wheels import Site
from tests.hosts.inventory import host_variables
from tests.hosts.machines import Host
from toolkit.errors import ToolkitError
from toolkit.fleet.send_wheels import needed_by
from toolkit.inventory.host import Host as KnownHost

pytestmark = pytest.mark.timeout(180)

SIZE = 12_000_000
STORE = "/var/lib/ddtoolkit/wheels"
SLOW = 0.1  # seconds each way, with which a connection brings some MB a second


@pytest.fixture
def site(host: Host, tmp_path: Path):
    """Wheels that the host lacks, and a store without any."""
    host.root(["rm", "-rf", STORE])
    return Site(tmp_path, KnownHost(host.name, host_variables(host)), None, SIZE)


def store(host: Host) -> Path:
    return host.path(STORE)


def on_its_way(host: Host, site: Site) -> int:
    """Bytes of the large wheel that have come."""
    part = store(host) / f".{site.large.name}.part"
    return part.stat().st_size if part.exists() else 0


class Bringing(threading.Thread):
    """A transfer that is under way, over a slow connection."""

    def __init__(self, host: Host, site: Site) -> None:
        super().__init__()
        self.site, self.box = site, host
        self.ended: dict | ToolkitError | None = None
        host.delay(SLOW)

    def run(self) -> None:
        try:
            self.ended = self.site.bring()
        except ToolkitError as error:
            self.ended = error

    def __enter__(self):
        self.start()
        end = time.monotonic() + 60
        while on_its_way(self.box, self.site) < 1_000_000:
            assert self.is_alive(), self.ended
            assert time.monotonic() < end
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.box.delay(0)
        self.join(120)
        assert isinstance(self.ended, dict), self.ended


def test_they_are_roots_and_only_what_is_lacking_comes(host: Host, site: Site) -> None:
    assert len(needed_by(site.host, site.order(), site.tell).lacking) == 2
    assert not store(host).exists()
    assert site.bring()["files"] == 2
    assert site.whole(store(host))
    found = host.root(["find", STORE, "-printf", "%u %g %m %f\\n"]).stdout.splitlines()
    lock = f"{site.lock.folder_name}.txt"
    wanted = [f"root root 644 {name}" for name in (site.large.name, site.small.name, lock)]
    assert sorted(found) == sorted([*wanted, "root root 755 wheels", "root root 600 .wheels.lock"])
    assert site.bring() == {"files": 0, "bytes": 0}


def test_a_connection_that_breaks_is_gone_on_with_where_it_broke(host: Host, site: Site) -> None:
    with Bringing(host, site) as bringing:
        host.break_connections()
    assert any("connecting again" in line for line in site.said)
    assert bringing.ended["bytes"] < SIZE - 900_000
    assert site.whole(store(host))


def test_a_cable_that_is_pulled_out_for_a_while_costs_that_while(
    host: Host, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.remote.agent.SILENCE", 2.0)
    with Bringing(host, site) as bringing:
        host.cut()
        while not any("connecting again" in line for line in site.said):
            time.sleep(0.05)
        host.restore()
    assert bringing.ended["bytes"] < SIZE - 900_000
    assert site.whole(store(host))


def test_a_reboot_in_the_middle_costs_what_had_not_come(host: Host, site: Site) -> None:
    with Bringing(host, site) as bringing:
        host.power_cut()
    assert bringing.ended["bytes"] < SIZE - 900_000
    assert site.whole(store(host))


def test_a_damaged_wheel_here_is_refused_before_anything_is_sent(host: Host, site: Site) -> None:
    data = bytearray(site.large.read_bytes())
    data[5000] ^= 1
    site.large.write_bytes(data)
    with pytest.raises(ToolkitError, match=rf"{site.large} is damaged: .*nothing was sent"):
        site.bring()
    assert not [path for path in store(host).iterdir() if path.suffix == ".whl" or path.stat().st_size]


def test_a_wheel_that_rots_on_the_host_is_replaced(host: Host, site: Site) -> None:
    site.bring()
    wheel = store(host) / site.small.name
    data = bytearray(wheel.read_bytes())
    data[10] ^= 1
    wheel.write_bytes(data)
    assert site.bring()["files"] == 1
    assert site.whole(store(host))


def test_what_does_not_fit_is_refused_before_the_first_byte(host: Host, site: Site) -> None:
    host.fill_disk(leave=SIZE // 2)
    try:
        with pytest.raises(
            ToolkitError, match=rf"{host.name}: not enough disk below {STORE}: wheels 12\.0 MB"
        ) as caught:
            site.bring()
    finally:
        host.empty_disk()
    assert "free some space" in caught.value.hint
    assert not list(store(host).glob("*.whl")) + list(store(host).glob(".*.part"))
    site.bring()
    assert site.whole(store(host))
