"""Commands on the hosts of an inventory: the same words as on this machine, host by host."""

from toolkit.cli.fleet.changing import change, full_test, rollback, swap, uninstall, upgrade
from toolkit.cli.fleet.deploying import deploy
from toolkit.cli.fleet.looking import finish_looking, look, plan, render, show_each, stream
from toolkit.cli.fleet.shown import show_errors
from toolkit.cli.fleet.where import Manner, Where, begin_listing, carrying, service_of, where

__all__ = [
    "Manner",
    "Where",
    "begin_listing",
    "carrying",
    "change",
    "deploy",
    "finish_looking",
    "full_test",
    "look",
    "plan",
    "render",
    "rollback",
    "service_of",
    "show_each",
    "show_errors",
    "stream",
    "swap",
    "uninstall",
    "upgrade",
    "where",
]
