"""What is measured on a host, made from a short description of it; the figures are synthetic."""

from __future__ import annotations

from typing import Any

from tests.doctor.recorded import NVLINK, Site
from toolkit.doctor.load_result import Copy, LinkSeen, Load, Peer, Reduced, Run

SIZES = {8 << 10: 41e-6, 473_088: 96e-6, 64 << 20: 3.2e-3}


def healthy(site: Site, **changes: Any) -> Load:
    """Everything as it should be; `changes` replace attributes."""
    gpus = tuple(card.index for card in site.cards)
    fast = any(card.name == NVLINK for card in site.cards)
    found: dict[str, Any] = {
        "gpus": gpus,
        "groups": (gpus,),
        "software": {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.27.5"},
        "copying": Run("done", status=0),
        "alone": tuple(Copy(gpu, 55.6 + gpu / 10, 54.2, 0) for gpu in gpus),
        "together": tuple(Copy(gpu, 27.5, 26.1, 0) for gpu in gpus),
        "links": tuple(LinkSeen(card.index, card.max_generation, 16) for card in site.cards),
        "peers": tuple(
            Peer(source, target, True, 712.0 if fast else 39.0, 0)
            for source in gpus
            for target in gpus
            if source != target
        ),
        "reducing": Run("done", status=0),
        "reduced": tuple(
            Reduced(gpu, size, seconds / (20 if fast else 1), 0)
            for gpu in gpus
            for size, seconds in SIZES.items()
        ),
        "ways": {"P2P": 2 * len(gpus)},
        "record": "/var/lib/ddtoolkit/state/x/load.json",
    }
    return Load(**{**found, **changes})
