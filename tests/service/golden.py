"""The units of every shipped profile and overlay: `python -m tests.service.golden` writes them anew.

They are kept under `units/`, one argument a line, so that a change of a profile or of the rendering shows
in a review as what it does to a host.
"""

import re
from pathlib import Path

from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.service.command import unit_for
from toolkit.service.systemd import render_unit

FOLDER = Path(__file__).with_name("units")
PYTHON = Path("/opt/ddtoolkit/envs/0123456789abcdef/bin/python")
SYSTEMD = 255  # Ubuntu 24.04's
RELEASE = "20260101T000000Z-00000000"

_WAYS = ((), ("linear-dflash",), ("chain-control",), ("plain",), ("pp8",), ("ep8",), ("ep4",))
_SMALL = (("qwen3-8b", "gpus-1"), ("qwen3-8b", "gpus-2"), ("qwen3-8b", "gpus-2", "linear-dflash"))
CASES = {
    "rtx-pro-6000-pcie-8x": _WAYS,
    "b300-nvlink-8x": _WAYS,
    "h200-nvlink": (*_WAYS, *_SMALL),
    "systemd-cpu": ((),),
}
NAMES = ["+".join((profile, *overlays)) for profile, ways in CASES.items() for overlays in ways]


def rendered(name: str, *sets: str, systemd: int = SYSTEMD) -> str:
    """The unit of `profile+overlay+...` as a deploy would write it."""
    profile, *overlays = name.split("+")
    resolved = load_profile(profile, overlays=[Path(item) for item in overlays], sets=sets).profile
    layout = Layout(None)
    release = layout.service(profile).releases / RELEASE
    return render_unit(unit_for(resolved, release_dir=release, layout=layout, python=PYTHON), systemd)


def folded(unit: str) -> str:
    """The unit with each flag of ExecStart= on a line of its own, which systemd.syntax(7) joins again."""
    lines = unit.split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith("ExecStart="))
    lines[start] = re.sub(r' (?="-)', " \\\n    ", lines[start])
    return "\n".join(lines)


def joined(text: str) -> str:
    """The unit of `folded`'s text."""
    return text.replace(" \\\n    ", " ")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.service"):
        old.unlink()
    for name in NAMES:
        (FOLDER / f"{name}.service").write_text(folded(rendered(name)), encoding="utf-8")
    print(f"{len(NAMES)} units in {FOLDER}")
