#!/bin/bash
# Run in mount, pid, network, ipc, host name and cgroup namespaces of its own: becomes a machine whose
# first process is systemd, and which has no unit but those in /etc/systemd/system. All that it writes
# is in memory and goes with it.
#
#   systemd_machine.sh FOLDER PYTHON VENV PROJECT
#
# They are seen as /mnt/given, /mnt/python, /mnt/venv and /mnt/project.
set -euo pipefail
mount --make-rprivate /
names=(given python venv project)
# They may lie below what is about to be covered.
kept=$(mktemp -d -p /run)
for name in "${names[@]}"; do
  mkdir "$kept/$name"
  mount --rbind "$1" "$kept/$name"
  shift
done
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -p /mnt/etc/{upper,work} /mnt/var/{upper,work}
for name in "${names[@]}"; do
  mkdir "/mnt/$name"
  mount --rbind "$kept/$name" "/mnt/$name"
  umount -R "$kept/$name"
done
rm -d "$kept"/* "$kept"
for tree in etc var; do
  mount -t overlay overlay -o "lowerdir=/$tree,upperdir=/mnt/$tree/upper,workdir=/mnt/$tree/work" "/$tree"
done
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /opt
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
install -D -m 755 /mnt/given/conductor /opt/vram-conductor/bin/conductor
rm -rf /etc/systemd/system
mkdir -p /etc/systemd/system
for target in default multi-user sysinit basic network-online shutdown; do
  printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" \
    > "/etc/systemd/system/$target.target"
done
# There is no journal: what services say is kept here.
mkdir /etc/systemd/system/service.d
printf '[Service]\nStandardOutput=append:/run/said\nStandardError=append:/run/said\n' \
  > /etc/systemd/system/service.d/said.conf
export container=test SYSTEMD_UNIT_PATH=/etc/systemd/system
exec /lib/systemd/systemd --system --log-target=console
