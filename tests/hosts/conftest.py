"""Fixtures that boot real hosts; without root or namespaces the tests that use them are skipped."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.hosts import rootfs
from tests.hosts.machines import Host
from tests.hosts.needs import why_not
from tests.hosts.network import Network
from tests.hosts.stub_on_host import prepare

MakeHost = Callable[..., Host]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what takes minutes on a new machine here, where no test's time limit counts it."""
    wanted = any("network" in getattr(item, "fixturenames", ()) for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    with contextlib.suppress(RuntimeError):  # the fixture tries again, and fails where it is seen
        if why_not() is None:
            for release in rootfs.RELEASES:
                rootfs.tree(release)


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """The network of every host of this test run; also what removes them."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Network()
    yield made
    made.close()


@pytest.fixture(scope="module")
def make_host(network: Network) -> Iterator[MakeHost]:
    """Boots hosts that live as long as the module's tests: `make_host("trixie", engine=True)`."""
    with contextlib.ExitStack() as hosts:

        def make(
            release: str = "bookworm",
            *,
            name: str | None = None,
            binds: Sequence[str | Path] = (),
            engine: bool = False,
            disk: str = "2G",
        ) -> Host:
            host = Host(network, release, name=name, binds=binds, with_engine=engine, disk=disk)
            hosts.callback(host.stop)
            return host

        yield make


@pytest.fixture(scope="module")
def host(make_host: MakeHost) -> Host:
    """One host with Debian 12."""
    return make_host("bookworm")


@pytest.fixture(scope="module")
def two_hosts(make_host: MakeHost) -> tuple[Host, Host]:
    """One host with Debian 12 and one with Debian 13."""
    return make_host("bookworm"), make_host("trixie")


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def machine(request: pytest.FixtureRequest, make_host: MakeHost) -> Host:
    """A host on which the toolkit and a stub service can be used directly, once with each Debian."""
    made = make_host(request.param, engine=True)
    prepare(made)
    return made
