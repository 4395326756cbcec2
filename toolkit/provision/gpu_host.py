"""What `hosts prepare` and the playbook `gpu.yml` make of a host with GPUs.

Package names: Ubuntu's archive has `nvidia-driver-580-server-open` and `nvidia-fabricmanager-580`; NVIDIA's
has `nvidia-open-580` and `nvidia-fabricmanager-580` up to branch 580, and names without a branch from 590 on
(NVIDIA driver installation guide, "Recent updates"). Blackwell takes the open kernel modules only (ibid.).
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import ConfigError
from toolkit.hardware.catalogue import find_gpu
from toolkit.profile.schema import Driver, Hardware, Profile

_TOOLS = ("pciutils",)  # lspci and setpci
_NVLINK_5 = 10  # compute capability, major: from here on switches are run by nvlsm, over ib_umad
_FABRIC_MODULES = ("ib_umad", "mlx5_ib")


def gpu_host_settings(profile: Profile) -> dict[str, Any] | None:
    """The variables of the role `gpu_host`, JSON-safe; None where the profile has no `hardware.driver`."""
    hardware, driver = profile.hardware, profile.hardware.driver
    if driver is None:
        return None
    nvlink = hardware.interconnect == "nvlink"
    fifth = nvlink and _major(hardware) >= _NVLINK_5
    return {
        "branch": driver.branch,
        "min_driver": hardware.min_driver or "",
        "driver_packages": list(_driver_names(driver)),
        "fabric_packages": list(_fabric_names(driver)) if nvlink else [],
        "packages": [*_TOOLS, *_toolkit(hardware, driver), *(("nvlsm",) if fifth else ())],
        "boot_modules": list(_FABRIC_MODULES) if fifth else [],
        "kernel_arguments": list(driver.kernel_arguments),
        "module_options": list(driver.module_options),
        "acs_off": driver.acs_off,
    }


def require_gpu_host(profile: Profile) -> dict[str, Any]:
    """As `gpu_host_settings`.

    Raises:
        ConfigError: the profile says nothing of a driver.
    """
    settings = gpu_host_settings(profile)
    if settings is None:
        raise ConfigError(
            f"profile {profile.name!r} has no hardware.driver: there is nothing to prepare a host for",
            hint="set hardware.driver.branch; docs/provisioning.md has the other keys",
        )
    return settings


def _driver_names(driver: Driver) -> tuple[str, ...]:
    if driver.package is not None:
        return (driver.package,)
    return (f"nvidia-driver-{driver.branch}-server-open", f"nvidia-open-{driver.branch}", "nvidia-open")


def _fabric_names(driver: Driver) -> tuple[str, ...]:
    if driver.fabric_manager is not None:
        return (driver.fabric_manager,)
    return (f"nvidia-fabricmanager-{driver.branch}", "nvidia-fabricmanager")


def _toolkit(hardware: Hardware, driver: Driver) -> tuple[str, ...]:
    if not driver.cuda_toolkit or hardware.cuda is None:
        return ()
    return (f"cuda-toolkit-{hardware.cuda.replace('.', '-')}", "ninja-build")


def _major(hardware: Hardware) -> int:
    capability = hardware.compute_capability
    if capability is None and hardware.gpu is not None and (gpu := find_gpu(hardware.gpu)) is not None:
        capability = gpu.compute_capability
    return 0 if capability is None else int(capability.partition(".")[0])
