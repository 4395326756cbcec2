"""Making GPU hosts ready, without any."""

import os
import signal
import time

import pytest

from toolkit.cli.main import _interrupted
from toolkit.errors import StoppedWatchingError
from toolkit.fleet.gpu_hosts import prepare_in_turn


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, _interrupted)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_says_that_a_host_may_be_drained(monkeypatch, interruptible):
    def run(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        return {}

    monkeypatch.setattr("toolkit.fleet.gpu_hosts.run_on_hosts", run)
    with pytest.raises(StoppedWatchingError, match="one of gpu1, gpu2 may be drained") as caught:
        prepare_in_turn({}, [], ["gpu1", "gpu2"], print, allow_reboot=True, look=print)
    assert "the same command again" in caught.value.hint
