"""The release of SGLang that the plugin is made for, and the one that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.5.17"
"""The one release of SGLang whose internals the worker is written for."""


def installed_version() -> str:
    """SGLang's version here, empty where it is not installed as a distribution."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""
