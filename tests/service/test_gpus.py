"""What the GPU driver still holds after a stop, by a recorded nvidia-smi."""

import time

import pytest

from toolkit.service.gpus import wait_released


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Makes nvidia-smi answer with a text, and from its second call on with another."""

    def answer(first, later):
        for name, text in (("1", first), ("2", later)):
            (tmp_path / name).write_text(text)
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat {tmp_path}/1\ncp {tmp_path}/2 {tmp_path}/1\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return answer


def test_memory_that_is_freed_late_is_waited_for(nvidia_smi):
    nvidia_smi("4711\n12\n", "12\n")
    assert wait_released({4711, 4712}, 5.0) == ""


def test_memory_that_is_not_freed_is_told_with_its_process(nvidia_smi):
    nvidia_smi("4712\n4711\n12\n", "4712\n4711\n12\n")
    begin = time.monotonic()
    assert wait_released({4711, 4712}, 0.3) == "the GPU driver still holds memory of process 4711, 4712"
    assert time.monotonic() - begin < 3


def test_without_gpus_there_is_nothing_to_wait_for(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert wait_released({4711}, 5.0) == ""
