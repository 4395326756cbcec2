"""What comes from a service's server, or from another one in its place, as commands tell it."""

import os
import socket

from tests.deploy.conftest import Site
from toolkit.profile.loading import load_profile
from toolkit.release.locate import layout_of


def test_a_server_s_output_is_shown_and_not_obeyed(staged: Site) -> None:
    """A server may log what its clients send."""
    log = layout_of(load_profile(str(staged.profile)).profile).service("local").log
    log.write_bytes(b"prompt: \x1b]0;own\x07 \xc2\x9b2J\n")
    assert staged.run("logs").stdout == "prompt: \ufffd]0;own\ufffd \ufffd2J\n"
    assert staged.json("logs")["lines"] == ["prompt: \x1b]0;own\x07 \x9b2J"]


def test_a_stranger_on_the_port_is_told_in_place_of_a_row_a_check(staged: Site) -> None:
    with socket.create_server(("127.0.0.1", staged.port)):
        shown = staged.run("test")
    assert shown.returncode == 1
    assert shown.stderr.startswith(
        f"error: local: port {staged.port} on 127.0.0.1 is held by process {os.getpid()} ("
    )
    assert shown.stderr.endswith(
        "), which is not its server: local is stopped\n"
        "  next: stop what holds it; then: ddtoolkit start local\n"
    )
