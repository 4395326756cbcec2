"""Writes the reference of every profile key from the schema: `python -m toolkit.profile.reference`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from toolkit.profile.nodes import KeyPath, format_path
from toolkit.profile.recorded import RECORDED
from toolkit.profile.shape import Shape, profile_shape
from toolkit.profile.show import yaml_scalar

_INTRODUCTION = """\
# Profile reference

<!-- Written by `python -m toolkit.profile.reference > docs/profile.md`. Change the schema, not this file. -->

A profile is one YAML file that says what is served, on what hardware, and how. `ddtoolkit validate NAME`
checks one and reports every problem with its file, line, column and key path;
`ddtoolkit profiles show NAME --resolved` prints it with all defaults and where each value came from;
`ddtoolkit profiles schema` prints its JSON Schema for editors.

**Names.** `NAME` is looked up as `NAME.yaml` in `./profiles`, in the folder that `DDTOOLKIT_PROFILES` names,
and among the profiles that come with the toolkit; the first match wins. Anything with a `/` in it, or that
ends in `.yaml` or `.yml`, is a path.

**Types follow the schema.** Where a key takes text, an unquoted value is that text, as it stands: `0.10`,
`on`, `1e3`. Where it takes a number or a boolean, only decimal numbers, `true` and `false` count; `on`,
`yes`, `010`, `0x1f`, `1_000` and `1:30` are refused, and so is a number in quotes. `null`, `~` or nothing
unsets a key that may be unset. Durations are a number with a unit of ms, s, m (or min), h or d: `90s`, `20m`.
Sizes are a number with a unit of B, KB, MB, GB, TB or KiB, MiB, GiB, TiB: `512MiB`.

**YAML.** One document, UTF-8, at most 128 KiB and 32 levels. Anchors and aliases work; merge keys (`<<`),
tags and keys written twice are refused. Nothing in a profile is executed or expanded.

**Overlays** (`--overlay NAME` or `FILE`, repeated) are merged onto the profile key by key, in order; lists
and plain values are replaced. A name is looked up in `overlays` of the folders above; with the toolkit come
`linear-dflash`, `chain-control` and `plain` (how tokens are decoded), `pp8`, `ep8` and `ep4` (how a model is
spread), `qwen3-8b`, `gpus-1` and `gpus-2` (a smaller pair, fewer GPUs). An overlay cannot change `name`.
Where two set a key to different values the later counts, and `validate`, `plan`, `deploy` and `profiles show`
say which said what.

@RECORDED@

**Hardware profiles** with a page each: [`rtx-pro-6000-pcie-8x`](rtx-pro-6000-pcie-8x.md),
[`b300-nvlink-8x`](b300-nvlink-8x.md), [`h200-nvlink`](h200-nvlink.md). Another machine needs little: memory
and compute capability of known GPUs come from the catalogue (`toolkit/hardware/gpus.toml`), sizes of known
checkpoints from `toolkit/profile/memory/shapes.toml`. `ddtoolkit profiles show NAME --memory` prints what
one GPU has to hold, term by term, for each way to spread the model; `validate` refuses what does not fit and
says the sum.

**`--set key.path=value`** comes last. For a key that takes text, the value is taken byte for byte, and `null`
unsets it if it may be unset; for others it is read as YAML and replaces the whole value:
`--set speculative.budget=7`, `--set engine.extra_args='[--log-level, debug]'`,
`--set service.environment.GREETING='a: "b"'`.

**Secrets** are references, never values: `api_key: {env: DDTREE_KEY}`, `{file: /etc/ddtoolkit/key}`, or
`{command: [pass, show, ddtree]}`.
"""


def _recorded() -> str:
    keys = ", ".join(f"`{key}`" for key in RECORDED)
    text = (
        f"**Without a restart.** The server does not depend on {keys}: a change of these alone is put on "
        "record with the release that serves. Any other key makes a new release, with one restart."
    )
    return textwrap.fill(text, 110, break_on_hyphens=False)


def reference() -> str:
    """The reference in Markdown, one table a section."""
    parts = [_INTRODUCTION.replace("@RECORDED@", _recorded())]
    for path, shape in _sections((), profile_shape()):
        title = f"`{format_path(path)}`" if path else "Top level"
        parts.append(f"## {title}\n\n{_sentence(shape.description)}\n\n{_table(shape)}")
    return "\n".join(parts)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _sections(path: KeyPath, shape: Shape) -> Iterator[tuple[KeyPath, Shape]]:
    yield path, shape
    for name, child in shape.keys.items():
        if child.keys:
            yield from _sections((*path, name), child)


def _table(shape: Shape) -> str:
    rows = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for name, child in shape.keys.items():
        takes = (
            "a map, or null" if child.keys and child.nullable else "a map" if child.keys else child.allowed()
        )
        default = "" if child.keys or (child.default is None and not child.nullable) else _code(child)
        rows.append(f"| `{name}` | {takes} | {default} | {child.description} |")
    return "\n".join(row.replace("\n", " ") for row in rows) + "\n"


def _code(shape: Shape) -> str:
    return f"`{yaml_scalar(shape.default)}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
