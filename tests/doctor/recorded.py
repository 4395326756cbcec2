"""Recorded hosts: what the programs and files of a GPU host say, made from a short description of it.

The forms are those of driver 580 as outputs/ has them; the values are those of the two machines by their
public records, or synthetic where SOURCES.toml says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

PCIE, NVLINK = "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA B300 SXM6 AC"
DRIVER, CUDA = "580.95.05", "13.0"
_BUSES = (0x16, 0x27, 0x38, 0x5A, 0x96, 0xA7, 0xB8, 0xDA)


@dataclass(frozen=True)
class Card:
    """One GPU; the attributes are the driver's own words."""

    index: int
    name: str = PCIE
    total_mib: int = 97887
    used_mib: int = 4
    persistence: str = "Enabled"
    mig: str = "Disabled"
    ecc: str = "Enabled"
    pending_ecc: str = "Enabled"
    uncorrectable: int = 0
    uncorrectable_ever: int = 0
    repair_pending: str = "No"
    repair_failed: str = "No"
    recovery: str = "None"
    state: str = "P8"
    utilization: int = 0
    generation: int = 1
    max_generation: int = 5
    device_generation: int = 5
    width: int = 16
    max_width: int = 16
    fabric: tuple[str, str] = ("N/A", "N/A")
    processes: tuple[tuple[int, str, str, int], ...] = ()  # pid, type, name, MiB

    @property
    def address(self) -> str:
        return f"0000:{_BUSES[self.index]:02x}:00.0"

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index:08x}-0000-4000-8000-{self.index:012x}"


@dataclass(frozen=True)
class Site:
    """One host.

    Attributes:
        cards: its GPUs.
        nvlink: links of each GPU; 0 without NVLink.
        far: the word of `topo -m` between GPUs of two sockets.
        refused: pairs that may not read each other's memory, with the word.
        acs: addresses of bridges whose ACS redirects.
        iommu: type of the GPUs' IOMMU groups; "" without one.
        driver: version of the kernel module and of nvidia-smi.
        library: version of the user-space library.
        modules: loaded kernel modules.
        fabric_unit: state of the fabric manager's unit: load, active, result.
        fabric_manager: its version.
        cmdline: the kernel's command line.
        nouveau: addresses that nouveau has.
        memory_gib: the host's own memory.
        packages: installed packages of the driver: name, want, version.
        broken: what nvidia-smi says instead of all else, with its status.
    """

    cards: tuple[Card, ...]
    nvlink: int = 0
    far: str = "SYS"
    refused: dict[tuple[int, int], str] = field(default_factory=dict)
    acs: tuple[str, ...] = ()
    iommu: str = ""
    driver: str = DRIVER
    library: str = DRIVER
    modules: tuple[str, ...] = ("nvidia_uvm", "nvidia_modeset", "nvidia", "ib_umad")
    fabric_unit: tuple[str, str, str] = ("not-found", "inactive", "success")
    fabric_manager: str = ""
    cmdline: str = "BOOT_IMAGE=/vmlinuz root=/dev/sda2 ro iommu=off"
    nouveau: tuple[str, ...] = ()
    memory_gib: int = 1007
    packages: tuple[tuple[str, str, str], ...] = (
        ("libnvidia-compute-580-server", "hold", f"{DRIVER}-0ubuntu0.24.04.1"),
        ("nvidia-driver-580-server-open", "hold", f"{DRIVER}-0ubuntu0.24.04.1"),
    )
    broken: tuple[int, str] | None = None

    def with_card(self, index: int, **changes: Any) -> Site:
        """The host with one GPU changed."""
        cards = tuple(replace(card, **changes) if card.index == index else card for card in self.cards)
        return replace(self, cards=cards)

    def with_cards(self, **changes: Any) -> Site:
        """The host with every GPU changed."""
        return replace(self, cards=tuple(replace(card, **changes) for card in self.cards))

    def without(self, index: int) -> Site:
        """The host with a GPU fallen off the bus; lspci still has it."""
        return replace(self, cards=tuple(card for card in self.cards if card.index != index))


def pcie(count: int = 8) -> Site:
    """Eight RTX PRO 6000 Blackwell over PCIe, healthy and idle."""
    return Site(tuple(Card(index) for index in range(count)))


def b300(count: int = 8) -> Site:
    """Eight B300 over NVLink, healthy and idle."""
    card = Card(0, NVLINK, 275040, fabric=("Completed", "Success"), generation=5, max_generation=6,
                device_generation=6, state="P0")  # fmt: skip
    cards = tuple(replace(card, index=index) for index in range(count))
    return Site(
        cards, nvlink=18, fabric_unit=("loaded", "active", "success"), fabric_manager=DRIVER,
        cmdline="BOOT_IMAGE=/vmlinuz root=/dev/sda2 ro",
    )  # fmt: skip


def files(site: Site) -> dict[str, str]:
    """What the host's programs print, by name of the file that `program` prints."""
    return {
        "smi": smi(site),
        "list": "".join(f"GPU {n}: {card.name} (UUID: {card.uuid})\n" for n, card in enumerate(site.cards)),
        "topology": topology(site),
        "p2p": p2p(site),
        "nvlink": nvlink(site),
        "lspci": lspci(site),
        "version": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {site.driver}  Release Build  "
        "(dvs-builder@U22)\nGCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n",
        "meminfo": f"MemTotal:       {site.memory_gib << 20} kB\nHugePages_Total:       0\n",
        "os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nVERSION_ID="24.04"\n',
        "cmdline": site.cmdline + "\n",
        "fabric_unit": "LoadState={}\nActiveState={}\nSubState=-\nResult={}\n".format(*site.fabric_unit),
        "fabric_manager": f"Fabric Manager version is : {site.fabric_manager}\n"
        if site.fabric_manager
        else "",
        "packages": "".join(f"{name} installed {want} {version}\n" for name, want, version in site.packages),
        "broken": "" if site.broken is None else site.broken[1],
        "status": "0" if site.broken is None else str(site.broken[0]),
    }


def smi(site: Site) -> str:
    cards = "".join(map(_card, site.cards))
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
\t<timestamp>Mon Nov 30 12:00:00 2026</timestamp>
\t<driver_version>{site.driver}</driver_version>
\t<cuda_version>{CUDA}</cuda_version>
\t<attached_gpus>{len(site.cards)}</attached_gpus>
{cards}</nvidia_smi_log>
"""


def _card(card: Card) -> str:
    processes = "".join(
        f"<process_info><gpu_instance_id>N/A</gpu_instance_id><compute_instance_id>N/A</compute_instance_id>"
        f"<pid>{pid}</pid><type>{kind}</type><process_name>{name}</process_name>"
        f"<used_memory>{used} MiB</used_memory></process_info>"
        for pid, kind, name, used in card.processes
    )
    errors = "<sram_correctable>0</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>"
    errors += "<sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_correctable>0</dram_correctable>"
    return f"""\t<gpu id="0000{card.address.upper()}">
\t\t<product_name>{card.name}</product_name>
\t\t<persistence_mode>{card.persistence}</persistence_mode>
\t\t<mig_mode><current_mig>{card.mig}</current_mig><pending_mig>{card.mig}</pending_mig></mig_mode>
\t\t<uuid>{card.uuid}</uuid>
\t\t<minor_number>{card.index}</minor_number>
\t\t<gpu_recovery_action>{card.recovery}</gpu_recovery_action>
\t\t<pci>
\t\t\t<pci_bus_id>0000{card.address.upper()}</pci_bus_id>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>{card.max_generation}</max_link_gen>
\t\t\t\t\t<current_link_gen>{card.generation}</current_link_gen>
\t\t\t\t\t<device_current_link_gen>{card.generation}</device_current_link_gen>
\t\t\t\t\t<max_device_link_gen>{card.device_generation}</max_device_link_gen>
\t\t\t\t\t<max_host_link_gen>{card.max_generation}</max_host_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>{card.max_width}x</max_link_width>
\t\t\t\t\t<current_link_width>{card.width}x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t</pci>
\t\t<performance_state>{card.state}</performance_state>
\t\t<fb_memory_usage><total>{card.total_mib} MiB</total><used>{card.used_mib} MiB</used></fb_memory_usage>
\t\t<utilization><gpu_util>{card.utilization} %</gpu_util></utilization>
\t\t<ecc_mode><current_ecc>{card.ecc}</current_ecc><pending_ecc>{card.pending_ecc}</pending_ecc></ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>{errors}<dram_uncorrectable>{card.uncorrectable}</dram_uncorrectable></volatile>
\t\t\t<aggregate>{errors}<dram_uncorrectable>{card.uncorrectable_ever}</dram_uncorrectable></aggregate>
\t\t</ecc_errors>
\t\t<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
\t\t<remapped_rows>
\t\t\t<remapped_row_corr>0</remapped_row_corr>
\t\t\t<remapped_row_unc>0</remapped_row_unc>
\t\t\t<remapped_row_pending>{card.repair_pending}</remapped_row_pending>
\t\t\t<remapped_row_failure>{card.repair_failed}</remapped_row_failure>
\t\t</remapped_rows>
\t\t<fabric><state>{card.fabric[0]}</state><status>{card.fabric[1]}</status></fabric>
\t\t<processes>{processes}</processes>
\t</gpu>
"""


def topology(site: Site) -> str:
    def word(one: int, other: int) -> str:
        near = one // 4 == other // 4
        return " X " if one == other else f"NV{site.nvlink}" if site.nvlink else "NODE" if near else site.far

    rows = range(len(site.cards))
    head = "".join(f"\tGPU{n}" for n in rows) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    body = "".join(
        f"GPU{n}\t{_tabbed(word(n, m) for m in rows)}\t{'0-63' if n < 4 else '64-127'}\t{n // 4}\t\tN/A\n"
        for n in rows
    )
    return head + body + "\nLegend:\n\n  X    = Self\n"


def p2p(site: Site) -> str:
    rows = range(len(site.cards))

    def word(one: int, other: int) -> str:
        pair = min(one, other), max(one, other)
        return "X" if one == other else site.refused.get(pair, "OK")

    head = " \t" + _tabbed(f"GPU{n}" for n in rows) + "\t\n"
    body = "".join(f" GPU{n}\t{_tabbed(word(n, m) for m in rows)}\t\n" for n in rows)
    return head + body + "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"


def nvlink(site: Site) -> str:
    links = "".join(f"\t Link {n}: 53.125 GB/s\n" for n in range(site.nvlink))
    return "".join(f"GPU {n}: {card.name} (UUID: {card.uuid})\n{links}" for n, card in enumerate(site.cards))


def lspci(site: Site) -> str:
    """A root port above each GPU, also of those that the driver has lost."""
    blocks = []
    for bus in _BUSES:
        port = f"0000:{bus - 1:02x}:01.0"
        mark = "+" if port in site.acs else "-"
        acs = (
            f"SrcValid+ TransBlk- ReqRedir{mark} CmpltRedir{mark} UpstreamFwd{mark} EgressCtrl- DirectTrans-"
        )
        blocks.append(
            f"{port} PCI bridge: Intel Corporation Device 352a (rev 04) (prog-if 00 [Normal decode])\n"
            f"\tBus: primary={bus - 1:02x}, secondary={bus:02x}, subordinate={bus:02x}, sec-latency=0\n"
            "\tCapabilities: [40] Express (v2) Root Port (Slot+), MSI 00\n"
            "\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <16us\n"
            "\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16\n"
            "\tCapabilities: [150 v1] Access Control Services\n"
            "\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-\n"
            f"\t\tACSCtl:\t{acs}\n"
        )
        blocks.append(
            f"0000:{bus:02x}:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)\n"
            "\tCapabilities: [60] Express (v2) Legacy Endpoint, MSI 00\n"
            "\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16\n"
        )
    return "\n".join(blocks)


def ports() -> tuple[str, ...]:
    """The root ports above the GPUs."""
    return tuple(f"0000:{bus - 1:02x}:01.0" for bus in _BUSES)


def addresses() -> tuple[str, ...]:
    """The GPUs that lspci has."""
    return tuple(f"0000:{bus:02x}:00.0" for bus in _BUSES)


def _tabbed(words: Iterable[str]) -> str:
    return "\t".join(words)
