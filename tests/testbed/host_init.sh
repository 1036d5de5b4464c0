#!/bin/sh
# First process of a testbed host, in fresh network, PID, mount, UTS and IPC namespaces.
# Makes a private, writable root over the machine's own (an overlay whose upper layer is a tmpfs), moves into it, says
# "ready", waits for the word "go" (the network is wired by then), and becomes its argument: sshd for a host, a sleep for
# the laptop. Every mount lives in this mount namespace and goes with it.
#   host_init.sh MOUNTPOINT HOSTNAME SIZE COMMAND...
set -eu
mountpoint=$1 hostname=$2 size=$3
shift 3
hostname "$hostname"
mount --make-rprivate /
mount -t tmpfs -o "size=$size,mode=755" testbed "$mountpoint"
mkdir "$mountpoint/upper" "$mountpoint/work" "$mountpoint/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$mountpoint/upper,workdir=$mountpoint/work" "$mountpoint/root"
cd "$mountpoint/root"

mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 dev dev
mkdir dev/pts dev/shm
for node in null zero full random urandom tty; do
    : >"dev/$node"
    mount --bind "/dev/$node" "dev/$node"
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mount -t tmpfs -o "size=$size,mode=1777" shm dev/shm
mount --bind tmp mnt
mount -t tmpfs -o "size=$size,mode=1777" tmp tmp
for path in ${TESTBED_KEEP:-}; do # a checkout or interpreter that itself lies under /tmp
    mkdir -p ".$path"
    mount --bind "mnt/${path#/tmp/}" ".$path"
done
umount mnt
mount -t tmpfs -o mode=755 run run
mkdir run/sshd run/lock

pivot_root . .
cd /
umount -l .
echo ready
read -r word
[ "$word" = go ]
exec "$@" </dev/null
