"""The GPUs that profiles can name."""

import re
from dataclasses import fields

import pytest

from toolkit.hardware.catalogue import Gpu, find_gpu, gpus, nearest_name

MARK = re.compile(r"(measured|sourced|unverified): \S.*")


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.names[0])
def test_every_value_says_how_it_is_known(gpu):
    values = {field.name for field in fields(Gpu)} - {"sources"}
    assert gpu.sources.keys() == values
    assert all(MARK.fullmatch(source) for source in gpu.sources.values())


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.names[0])
def test_values_are_of_a_gpu(gpu):
    assert re.fullmatch(r"\d{1,2}\.\d", gpu.compute_capability)
    assert gpu.architecture == "sm_" + gpu.compute_capability.replace(".", "")
    assert 16 << 10 < gpu.memory_mib < 1 << 20
    assert 48 << 10 < gpu.shared_memory_per_block <= 256 << 10
    assert (gpu.interconnect == "nvlink") == (gpu.nvlink_gb_s > 0) == (gpu.nvlinks > 0)
    assert gpu.pcie_width == 16


def test_a_name_is_of_one_gpu():
    names = [name for gpu in gpus() for name in gpu.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "capability", "memory"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", 97887),
        ("NVIDIA B300 SXM6 AC", "10.3", 275040),
        ("NVIDIA H200", "9.0", 143771),
    ],
)
def test_the_machines_of_the_profiles(name, capability, memory):
    gpu = find_gpu(name)
    assert (gpu.compute_capability, gpu.memory_mib) == (capability, memory)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("H200", "NVIDIA H200"), ("nvidia b300 sxm6", "NVIDIA B300 SXM6 AC"), ("zzz", None), ("", None)],
)
def test_the_nearest_name(written, meant):
    assert find_gpu(written) is None
    assert nearest_name(written) == meant
