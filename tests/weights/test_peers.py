"""One host hands a checkpoint out, others fetch it: over real TLS, with a token, and only while it lasts."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from tests.weights.checkpoints import contents
from toolkit.errors import ToolkitError
from toolkit.profile.source import parse
from toolkit.weights.bring import Terms, bring
from toolkit.weights.certificate import one_time_certificate
from toolkit.weights.origins import Origin, Peer
from toolkit.weights.seeding import _context, unseed
from toolkit.weights.serve import Seed
from toolkit.weights.store import damage, read_marker
from toolkit.weights.web import RefusedError, Web

NAME = "folder@v1"
FIRST = "model-00001-of-00003.safetensors"
TOKEN = "of-this-transfer"


@pytest.fixture
def certificate():
    return one_time_certificate()


@pytest.fixture
def seed(fetch, models, certificate):
    """A seed of the published checkpoint, running."""
    fetch()
    with Seed(models / NAME, address="", port=0, token=TOKEN, context=_context(*certificate)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def peer(seed, certificate):
    return Peer(f"https://127.0.0.1:{seed.server_port}/{NAME}/", TOKEN, certificate[0])


def from_peer(peer, source, folder, said=None):
    told = (said if said is not None else []).append
    return bring(Origin(source, peer=peer), Terms(folder), lambda value: told(str(value.get("line"))))


@pytest.fixture
def source(server):
    return parse(f"{server.url}/folder/", "v1")


def test_a_peer_gets_what_the_seed_has(peer, source, server, tmp_path, published, models):
    server.asked.clear()
    done = from_peer(peer, source, tmp_path / "other")
    assert done["fetched"] == done["bytes"]
    assert contents(tmp_path / "other" / NAME) == contents(published)
    assert server.asked == []  # its publisher was not asked again
    marker, first = read_marker(tmp_path / "other" / NAME), read_marker(models / NAME)
    assert marker.source == first.source == f"{server.url}/folder/ at v1"
    assert {path: mark.sha256 for path, mark in marker.files.items()} == {
        path: mark.sha256 for path, mark in first.files.items()
    }


def test_a_peer_goes_on_where_it_was(peer, source, tmp_path, published, monkeypatch):
    other = tmp_path / "other"
    asked = []
    real = Web.open

    def watched(self, url, **options):
        asked.append((url.rpartition("/")[2], options.get("start", 0)))
        if url.endswith(FIRST) and len(asked) < 8:
            raise ConnectionResetError(104, "Connection reset by peer")
        return real(self, url, **options)

    monkeypatch.setattr(Web, "open", watched)
    part = other / f"{NAME}.part"
    part.mkdir(parents=True)
    from_peer(peer, source, other)
    assert contents(other / NAME) == contents(published)


def test_a_range_of_a_seed_is_what_was_asked_for(peer, published):
    web = Web(token=TOKEN, certificate=peer.certificate)
    with web.open(peer.url + FIRST, start=1000) as response:
        assert (response.status, response.read()) == (206, (published / FIRST).read_bytes()[1000:])


@pytest.mark.parametrize("token", [None, "other", ""])
def test_without_the_token_nothing_is_told(peer, token):
    web = Web(token=token, certificate=peer.certificate)
    for path in ("listing.json", FIRST, "absent"):
        with pytest.raises(RefusedError, match="HTTP 401"):
            web.open(peer.url + path)


@pytest.mark.parametrize("path", ["../secret", "%2e%2e/secret", ".weights.json", "/etc/passwd", "absent"])
def test_what_the_marker_does_not_name_is_not_given(peer, models, path):
    (models / "secret").write_text("x")
    with pytest.raises(RefusedError, match="HTTP 404"):
        Web(token=TOKEN, certificate=peer.certificate).open(peer.url + path)


def test_a_link_in_its_place_is_not_followed(peer, models, tmp_path):
    (tmp_path / "secret").write_text("x")
    (models / NAME / FIRST).unlink()
    (models / NAME / FIRST).symlink_to(tmp_path / "secret")
    with pytest.raises(RefusedError, match="HTTP 404"):
        Web(token=TOKEN, certificate=peer.certificate).open(peer.url + FIRST)


def test_a_file_that_changed_is_not_given(peer, models):
    with (models / NAME / FIRST).open("ab") as file:
        file.write(b"x")
    with pytest.raises(RefusedError, match="HTTP 410"):
        Web(token=TOKEN, certificate=peer.certificate).open(peer.url + FIRST)


def test_another_certificate_is_not_trusted(peer, source, tmp_path):
    other = Peer(peer.url, TOKEN, one_time_certificate()[0])
    only_there = parse("peer://seed/folder@v1")
    with pytest.raises(ToolkitError, match="its certificate is not trusted here"):
        from_peer(other, only_there, tmp_path / "other")


def test_who_does_not_check_certificates_gets_nothing_without_tls(seed):
    with socket.create_connection(("127.0.0.1", seed.server_port), timeout=5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        said = b""
        with contextlib.suppress(ConnectionResetError):
            said = plain.recv(1 << 16)
        assert b"HTTP" not in said


def test_a_client_that_says_nothing_holds_up_nobody(seed, peer):
    with socket.create_connection(("127.0.0.1", seed.server_port)):
        web = Web(token=TOKEN, certificate=peer.certificate, silence=5.0)
        with web.open(peer.url + "listing.json") as response:
            assert response.status == 200


def test_a_seed_that_cannot_be_reached_is_passed_over(peer, source, server, tmp_path, published):
    gone = Peer("https://127.0.0.1:1/folder@v1/", TOKEN, peer.certificate)
    said = []
    from_peer(gone, source, tmp_path / "other", said)
    assert contents(tmp_path / "other" / NAME) == contents(published)
    assert any(f"it is fetched from {server.url}/folder/ at v1 instead" in line for line in said)


def test_a_checkpoint_that_only_a_peer_has_is_not_looked_for_elsewhere(peer, server, tmp_path):
    gone = Peer("https://127.0.0.1:1/folder@v1/", TOKEN, peer.certificate)
    with pytest.raises(ToolkitError, match="Connection refused"):
        from_peer(gone, parse("peer://ct200/folder@v1"), tmp_path / "other")
    from_peer(peer, parse("peer://ct200/folder@v1"), tmp_path / "third")
    assert read_marker(tmp_path / "third" / NAME).source == f"{server.url}/folder/ at v1"
    with pytest.raises(
        ToolkitError, match="is fetched from host ct200, which is not asked from here"
    ) as caught:
        from_peer(None, parse("peer://ct200/folder@v1"), tmp_path / "other")
    assert "inventory" in caught.value.hint


def test_a_damaged_checkpoint_is_not_handed_out(fetch, models, certificate):
    fetch()
    (models / NAME / FIRST).write_bytes(b"x")
    with pytest.raises(ToolkitError, match=rf"cannot be handed out: {FIRST} has 1 bytes"):
        Seed(models / NAME, address="", port=0, token=TOKEN, context=_context(*certificate))
    assert damage(models / NAME)


def test_it_ends_when_nobody_asks_and_when_it_is_told_to(fetch, models, certificate):
    fetch()
    for idle in (0.3, 600.0):
        with Seed(
            models / NAME, address="", port=0, token=TOKEN, context=_context(*certificate), idle=idle
        ) as seed:
            thread = threading.Thread(target=seed.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            peer = {"url": f"https://127.0.0.1:{seed.server_port}/x/", "token": TOKEN}
            if idle > 1:
                wrong = peer | {"token": "other", "certificate": certificate[0]}
                assert unseed({"peer": wrong}, print) == {"changed": False}
                time.sleep(0.2)
                assert thread.is_alive()
                assert unseed({"peer": peer | {"certificate": certificate[0]}}, print) == {"changed": True}
            thread.join(5)
            assert not thread.is_alive()


def test_the_key_is_on_no_disk(certificate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(_context(*certificate), ssl.SSLContext)
    assert list(tmp_path.iterdir()) == []
