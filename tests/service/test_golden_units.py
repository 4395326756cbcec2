"""The units of the shipped profiles: as they are kept for review, and as a real systemd reads them."""

import shutil

import pytest

from tests.service.golden import FOLDER, NAMES, PYTHON, folded, joined, rendered
from toolkit.service.systemd import verify_unit

AGAIN = "python -m tests.service.golden writes the units anew; look at what changes"


def kept(name):
    return (FOLDER / f"{name}.service").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_is_what_was_reviewed(name):
    assert folded(rendered(name)) == kept(name), AGAIN


def test_no_unit_is_left_over():
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.service" for name in NAMES}, AGAIN


@pytest.mark.parametrize("name", NAMES)
def test_the_folding_for_reviewers_changes_nothing(name):
    assert joined(kept(name)) == rendered(name)
    assert max(map(len, kept(name).splitlines())) < 150


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_systemd_has_no_word_against_it(name):
    text = kept(name).replace(str(PYTHON), "/usr/bin/env")
    assert list(verify_unit(text, name.split("+")[0])) == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("KillMode=mixed", "KillMode=mixd", "Failed to parse"),
        ("Requires=nvidia-fabricmanager.service", "StartLimitIntervalSec=ever", "Failed to parse"),
        ('    "--tp-size" "8" \\\n', '    "--tp-size" "8" \n', "Unknown key"),
        (str(PYTHON), str(PYTHON), "is not executable"),
    ],
)
def test_systemd_has_a_word_against_a_broken_one(old, new, said):
    text = kept("b300-nvlink-8x").replace(old, new)
    assert said in "\n".join(verify_unit(text, "b300-nvlink-8x"))


@pytest.mark.parametrize(
    ("name", "sets", "lines"),
    [
        ("rtx-pro-6000-pcie-8x", (), ["Wants=network-online.target nvidia-persistenced.service"]),
        ("b300-nvlink-8x", (), ["Requires=nvidia-fabricmanager.service", "LimitMEMLOCK=infinity"]),
        (
            "b300-nvlink-8x",
            ("service.bind=0.0.0.0", "service.api_key.env=A", "service.admin_api_key.file=/etc/k"),
            [f"LoadCredential=config.yaml:/var/lib/ddtoolkit/state/b300-nvlink-8x/secrets/{'20260101T000000Z-00000000'}.yaml"],
        ),
    ],
)  # fmt: skip
def test_what_the_machines_need(name, sets, lines):
    unit = rendered(name, *sets).splitlines()
    assert not [line for line in lines if line not in unit]


def test_pcie_needs_no_fabric_manager():
    assert "fabricmanager" not in rendered("rtx-pro-6000-pcie-8x")
