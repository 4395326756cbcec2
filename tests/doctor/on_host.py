"""A recorded host inside a real test host: programs that print what was recorded, reached over real SSH.

Files of /proc and /sys are mounted over the kernel's own, so that the collector reads them where it always
does.
"""

from __future__ import annotations

from tests.doctor.recorded import Site, addresses, files
from tests.hosts.machines import Host

FOLDER = "/opt/recorded"
# An older driver would refuse an unknown option; so does this one, and a test that asks otherwise fails.
_SMI = f"""#!/bin/sh
cd {FOLDER}
[ "$(cat status)" = 0 ] || {{ cat broken; exit "$(cat status)"; }}
case "$*" in
    "-q -x") cat smi ;;
    "-L") cat list ;;
    "topo -m") cat topology ;;
    "topo -p2p r") cat p2p ;;
    "nvlink -s") cat nvlink ;;
    *) echo "Invalid combination of input arguments."; exit 2 ;;
esac
"""
_SYSTEMCTL = f"""#!/bin/sh
case "$*" in
    *nvidia-fabricmanager*) cat {FOLDER}/fabric_unit ;;
    *) exec /usr/bin/systemctl "$@" ;;
esac
"""
_DPKG = f"""#!/bin/sh
case "$*" in
    *nvidia*) cat {FOLDER}/packages ;;
    *) exec /usr/bin/dpkg-query "$@" ;;
esac
"""
_FABRIC_MANAGER = f"#!/bin/sh\n[ -s {FOLDER}/fabric_manager ] && cat {FOLDER}/fabric_manager\n"
_PROGRAMS = {
    "nvidia-smi": _SMI,
    "lspci": f"#!/bin/sh\ncat {FOLDER}/lspci\n",
    "systemctl": _SYSTEMCTL,
    "dpkg-query": _DPKG,
    "nv-fabricmanager": _FABRIC_MANAGER,
    "ninja": "#!/bin/sh\n",
    "cc": "#!/bin/sh\n",
    "nvcc": "#!/bin/sh\n",
}
_MOUNTS = f"""
set -e
for file in cmdline meminfo; do
    mountpoint -q /proc/$file || mount --bind {FOLDER}/$file /proc/$file
done
mountpoint -q /proc/driver || mount -t tmpfs recorded /proc/driver
mkdir -p /proc/driver/nvidia
cp {FOLDER}/os-release /etc/os-release
cp {FOLDER}/version /proc/driver/nvidia/version
mount -o remount,rw /sys
mkdir -p /sys/module
for folder in /sys/bus/pci/devices /sys/class/iommu /sys/module; do
    mountpoint -q $folder || mount -t tmpfs recorded $folder
done
touch /dev/nvidiactl /dev/nvidia-uvm
chmod 666 /dev/nvidiactl /dev/nvidia-uvm
"""


def install(host: Host) -> None:
    """Put the programs into a host's PATH, before those of the system."""
    for name, text in _PROGRAMS.items():
        path = host.path(f"/usr/local/bin/{name}")
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


def become(host: Host, site: Site) -> None:
    """Let a host be the recorded one from now on."""
    folder = host.path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files(site).items():
        (folder / name).write_text(text, encoding="utf-8")  # in place: some are mounted elsewhere
    commands = [_MOUNTS, "rm -rf /sys/bus/pci/devices/* /sys/module/* /usr/lib/x86_64-linux-gnu/libcuda.so.*"]
    commands.append(f"touch /usr/lib/x86_64-linux-gnu/libcuda.so.{site.library}")
    commands.append(f"mkdir {' '.join(f'/sys/module/{name}' for name in site.modules)}")
    for address in addresses():
        device = f"/sys/bus/pci/devices/{address}"
        driver = "nouveau" if address in site.nouveau else "nvidia"
        commands.append(
            f"mkdir -p {device}/iommu_group {device}/{driver}; ln -s {driver} {device}/driver; "
            f"echo 0x10de > {device}/vendor; echo 0x030200 > {device}/class; "
            f"echo {site.iommu} > {device}/iommu_group/type"
        )
    host.root(["sh", "-c", "\n".join(commands)])
