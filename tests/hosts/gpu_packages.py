"""An apt repository with small packages that bear the names of NVIDIA's, and boots that behave as with GPUs.

The packages' programs are scripts: nvidia-smi, nvidia-persistenced, lspci, setpci and update-grub of hosts
that have neither GPUs nor PCI bridges nor a boot loader. What a real boot would load or read, a unit mounts
over /sys/module and /proc/cmdline: the module of the driver that is installed then, nouveau unless it is
blacklisted, and the command line that update-grub wrote.
"""

from __future__ import annotations

from pathlib import Path

from tests.hosts.apt import index, package
from tests.hosts.machines import Host

OLD, NEW, OLDEST = "570.86.15", "580.95.05", "580.65.06"
BRIDGE = "0000:40:01.1"

SMI = """#!/bin/sh
[ -d /sys/module/nvidia ] || { echo "NVIDIA-SMI has failed" >&2; exit 9; }
case "$*" in
    *persistence_mode*) cat /run/gpu/persistence 2>/dev/null || echo Disabled;;
esac
"""
PERSISTENCED = """#!/bin/sh
mkdir -p /run/gpu
for word; do
    case "$word" in
        --persistence-mode) echo Enabled > /run/gpu/persistence;;
        --no-persistence-mode) echo Disabled > /run/gpu/persistence;;
    esac
done
exec sleep infinity
"""
PERSISTENCED_UNIT = """[Unit]
Description=NVIDIA Persistence Daemon
[Service]
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose
[Install]
WantedBy=multi-user.target
"""
FABRIC_UNIT = """[Unit]
Description=NVIDIA fabric manager service
[Service]
ExecStart=/usr/bin/nv-fabricmanager
[Install]
WantedBy=multi-user.target
"""
# A fabric manager of another version than the loaded driver ends at once, as the real one does.
FABRIC = """#!/bin/sh
[ "$(cat /sys/module/nvidia/version)" = {version} ] || exit 1
exec sleep infinity
"""
LSPCI = f"""#!/bin/sh
on=+; [ -e /run/acs-is-off ] && on=-
printf '{BRIDGE} PCI bridge: A switch, downstream port\\n'
printf '\\tACSCap:\\tSrcValid+ TransBlk+ ReqRedir+\\n'
printf '\\tACSCtl:\\tSrcValid%s TransBlk- ReqRedir%s\\n\\n' $on $on
printf '0000:41:00.0 3D controller: A GPU\\n\\tACSCtl:\\tSrcValid+\\n'
"""
SETPCI = """#!/bin/sh
echo "$*" >> /var/log/setpci
touch /run/acs-is-off
"""
UPDATE_GRUB = """#!/bin/sh
GRUB_CMDLINE_LINUX=quiet
for file in /etc/default/grub.d/*.cfg; do [ -e "$file" ] && . "$file"; done
mkdir -p /boot/grub
echo "$GRUB_CMDLINE_LINUX" > /boot/grub/grub.cfg
echo ran >> /var/log/update-grub
"""
BOOT = """#!/bin/sh
mkdir -p /run/boot/module
driver=$(dpkg-query --show --showformat='${db:Status-Status} ${Version}\\n' 'nvidia-driver-*' 2>/dev/null |
    sed -n 's/^installed \\([0-9.]*\\).*/\\1/p' | head -1)
[ -n "$driver" ] && mkdir -p /run/boot/module/nvidia && echo "$driver" > /run/boot/module/nvidia/version
grep -qs '^blacklist nouveau' /etc/modprobe.d/*.conf || mkdir -p /run/boot/module/nouveau
cat /boot/grub/grub.cfg > /run/boot/cmdline 2>/dev/null || echo quiet > /run/boot/cmdline
[ -d /sys/module ] || { mount -o remount,rw /sys && mkdir /sys/module; }
mount --bind /run/boot/module /sys/module
mount --bind /run/boot/cmdline /proc/cmdline
"""
BOOT_UNIT = """[Unit]
DefaultDependencies=no
After=local-fs.target
Before=basic.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/boot-with-gpus
[Install]
WantedBy=sysinit.target
"""


def build(folder: Path) -> Path:
    """Write all packages and their index into `folder`; the folder."""
    for branch, version in ((570, OLD), (580, OLDEST), (580, NEW)):
        full = f"{version}-0ubuntu1"
        library = f"libnvidia-compute-{branch}-server"
        package(folder, library, full)
        package(
            folder,
            f"nvidia-driver-{branch}-server-open",
            full,
            {
                "/usr/bin/nvidia-smi": SMI,
                "/usr/bin/nvidia-persistenced": PERSISTENCED,
                "/lib/systemd/system/nvidia-persistenced.service": PERSISTENCED_UNIT,
            },
            Depends=f"{library} (= {full})",
            **dict.fromkeys(("Provides", "Conflicts", "Replaces"), "nvidia-driver-binary"),
        )
        package(
            folder,
            f"nvidia-fabricmanager-{branch}",
            full,
            {
                "/usr/bin/nv-fabricmanager": FABRIC.format(version=version),
                "/lib/systemd/system/nvidia-fabricmanager.service": FABRIC_UNIT,
            },
        )
    for name in ("cuda-toolkit-13-0", "ninja-build"):
        package(folder, name, "1.0-1")
    package(folder, "pciutils", "1.0-1", {"/usr/bin/lspci": LSPCI, "/usr/bin/setpci": SETPCI})
    package(folder, "grub2-common", "1.0-1", {"/usr/sbin/update-grub": UPDATE_GRUB})
    index(folder)
    return folder


def boot_with_gpus(host: Host, *, nouveau: bool = True) -> None:
    """Let the host's next boots behave as with GPUs; `nouveau` takes them until it is blacklisted."""
    host.root(["mkdir", "-p", "/etc/modprobe.d"])
    if not nouveau:
        host.path("/etc/modprobe.d/test.conf").write_text("blacklist nouveau\n")
    program = host.path("/usr/local/sbin/boot-with-gpus")
    program.write_text(BOOT)
    program.chmod(0o755)
    host.path("/etc/systemd/system/boot-with-gpus.service").write_text(BOOT_UNIT)
    host.root(["systemctl", "enable", "--quiet", "boot-with-gpus.service"])
