"""docs/h200-nvlink.md: what it tells people to type is what the commands take, and its inventory is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_walk import parse
from toolkit.inventory.load import load_hosts

PAGE = (Path(__file__).parents[1] / "docs" / "h200-nvlink.md").read_text(encoding="utf-8")
TYPED = [line.partition("  #")[0].strip() for line in PAGE.splitlines() if line.startswith("ddtoolkit ")]
TYPED += re.findall(r"`(ddtoolkit [^`]+)`", PAGE)


def test_the_page_names_every_step() -> None:
    names = {parse(line) for line in TYPED}
    assert names >= {
        "ddtoolkit hosts trust",
        "ddtoolkit hosts prepare",
        "ddtoolkit models add",
        "ddtoolkit deploy profile",
    }


@pytest.mark.parametrize("line", TYPED)
def test_a_command_about_the_host_names_the_inventory(line: str) -> None:
    assert ("-i inventory.yaml" in line) != (parse(line) == "ddtoolkit validate")


def test_the_inventory_lists_the_profile(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "inventory.yaml"
    path.write_text(block)
    (host,) = load_hosts([path])
    assert (host.name, host.profiles) == ("h200-1", ("h200-nvlink",))
