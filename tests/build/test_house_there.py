"""A folder of wheels that lies on a host, looked at before anything is changed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.build.wheels import lock_for, make_wheel
from toolkit.build.wheelhouse import Target, here
from toolkit.errors import ToolkitError
from toolkit.fleet.wheels_there import check_there, lacking_in
from toolkit.inventory.host import Host
from toolkit.layout import Layout

BOX = Host("box", {"ansible_connection": "local"})


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "house"
    folder.mkdir()
    return folder


def test_what_the_folder_lacks_is_named_with_what_fills_it(house: Path, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    gone = make_wheel(house, "gone")
    lock = lock_for(make_wheel(house, "torch"), make_wheel(house, "triton"), gone)
    check_there(BOX, lock, str(house), root)
    (house / "triton-1.0-py3-none-any.whl").unlink()  # this torch loads no CUDA
    check_there(BOX, lock, str(house), root)
    gone.unlink()
    with pytest.raises(ToolkitError) as caught:
        check_there(BOX, lock, str(house), root)
    python, machine = here().python, here().machine
    said = f"box: the wheelhouse {house} on this host has no gone==1.0 for Python {python} on {machine}"
    assert caught.value.message == f"{said}; nothing was changed"
    assert caught.value.hint is not None
    assert f"ddtoolkit wheelhouse --out DIR --engine mini --python {python} --machine" in caught.value.hint
    with pytest.raises(ToolkitError, match=rf"box: no wheelhouse {house}/none on this host"):
        check_there(BOX, lock, f"{house}/none", root)


def test_a_torch_that_loads_cuda_needs_its_libraries(house: Path, tmp_path: Path) -> None:
    torch = make_wheel(house, "torch", requires="Requires-Dist: nvidia-blas\n")
    lock = lock_for(torch, blas := make_wheel(house, "nvidia_blas"))
    check_there(BOX, lock, str(house), str(tmp_path))
    blas.unlink()
    with pytest.raises(ToolkitError, match=r"has no nvidia-blas==1\.0"):
        check_there(BOX, lock, str(house), str(tmp_path))


def test_wheels_that_were_brought_come_before_the_folder(house: Path, tmp_path: Path) -> None:
    lock, layout = lock_for(make_wheel(house, "torch")), Layout(tmp_path / "root")
    layout.wheels.mkdir(parents=True)
    (layout.wheels / f"{lock.folder_name}.txt").write_text(lock.text)
    check_there(BOX, lock, f"{house}/none", str(tmp_path / "root"))


@pytest.mark.parametrize(
    ("name", "suits"),
    [
        ("torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl", True),
        ("torch-2.13.0+cpu-cp313-cp313-linux_x86_64.whl", True),
        ("torch-2.13.0-cp38-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("torch-2.13.0-py3-none-any.whl", True),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp313-cp313-manylinux_2_28_aarch64.whl", False),
        ("torch-2.12.0-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("torch.whl", False),
    ],
)
def test_only_wheels_for_the_hosts_python_and_machine_count(house: Path, name: str, suits: bool) -> None:
    lock = lock_for(make_wheel(house, "torch", "2.13.0"))
    found = lacking_in([name], [], lock, Target("3.13", "x86_64"))
    assert found == ([] if suits else ["torch==2.13.0"])


def test_without_a_torch_nobody_knows_whether_cuda_is_needed(house: Path) -> None:
    lock = lock_for(make_wheel(house, "torch"), make_wheel(house, "nvidia_blas"), make_wheel(house, "plain"))
    assert lacking_in([], [], lock, Target("3.13", "x86_64")) == ["torch==1.0", "plain==1.0"]
