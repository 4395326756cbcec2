#!/usr/bin/env bash
# Turns a fresh root file system into a test host's: prepare.sh ROOT. Part of the key under which it is cached.
set -euo pipefail
root=$1

# Every host gets its own at its first boot.
: > "$root/etc/machine-id"
rm -f "$root"/etc/ssh/ssh_host_* "$root/var/lib/dbus/machine-id"
# Nothing outside is reachable: a name server that does not answer would only cost time.
rm -f "$root/etc/resolv.conf"
: > "$root/etc/resolv.conf"

chroot "$root" useradd --create-home --shell /bin/bash deploy
echo 'deploy ALL=(ALL) NOPASSWD: ALL' > "$root/etc/sudoers.d/deploy"
chmod 0440 "$root/etc/sudoers.d/deploy"
cat > "$root/etc/ssh/sshd_config.d/test.conf" <<'CONFIG'
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys .ssh/authorized_keys
PasswordAuthentication no
UseDNS no
MaxStartups 100
MaxSessions 100
CONFIG

chroot "$root" systemctl -q enable systemd-networkd.service
chroot "$root" systemctl -q set-default multi-user.target
chroot "$root" systemctl -q mask console-getty.service getty@.service getty.target serial-getty@.service \
    systemd-timesyncd.service systemd-resolved.service systemd-firstboot.service \
    systemd-networkd-wait-online.service apt-daily.timer apt-daily-upgrade.timer
mkdir -p "$root/var/log/journal"
