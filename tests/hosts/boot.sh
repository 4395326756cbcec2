#!/usr/bin/env bash
# Runs one test host until it is powered off: boot.sh FOLDER LOWER SIZE NSPAWN_ARGUMENT...
# It is started in the host's control group, its network's namespace and a mount namespace of its own.
# FOLDER/files is laid over the root file system LOWER; what the host writes goes to a memory disk of SIZE.
set -euo pipefail
folder=$1 lower=$2 size=$3
shift 3

mkdir -p /run/systemd "$folder/disk" "$folder/root"
mount -t tmpfs tmpfs /run/systemd
# nspawn finds out about this network namespace and about a control group hierarchy from these two.
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o "size=$size,mode=0755" disk "$folder/disk"
mkdir "$folder/disk/upper" "$folder/disk/work"
mount -t overlay -o "lowerdir=$lower,upperdir=$folder/disk/upper,workdir=$folder/disk/work" root "$folder/root"
cp -a "$folder/files/." "$folder/root/"

export SYSTEMD_NSPAWN_LOCK=0 SYSTEMD_NSPAWN_API_VFS_WRITABLE=network
while :; do
    rm -f "$folder/again"
    code=0
    systemd-nspawn "$@" || code=$?
    # 133 is a reboot from inside, the file one that looks like a power cut.
    [ "$code" = 133 ] || [ -e "$folder/again" ] || exit "$code"
done
