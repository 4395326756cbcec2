"""Entry point of SGLang's plugin loader, which runs in the launcher and first thing in each scheduler.

SGLang only logs what goes wrong while a plugin loads or a hook is applied. A server that does not use
DDTREE is then as without the plugin; one that does is refused by `hooks.check_version`, `check_flags` and
`check_serving`.
"""

from __future__ import annotations

import os

from toolkit.ddtree.sglang.options import ALGORITHM, ENVIRONMENT


def register() -> None:
    """Add DDTREE's flags and name to SGLang; in processes that serve DDTREE, hook what serving needs."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from toolkit.ddtree.sglang import hooks
    from toolkit.ddtree.sglang.algorithm import DDTreeAlgorithm, create_worker, validate

    hooks.register_flags()
    if ENVIRONMENT in os.environ:
        hooks.register_serving()
    SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=validate, spec_class=DDTreeAlgorithm
    )(create_worker)
