#!/bin/sh
# What the testbed needs of the machine, and packages named as arguments that a test needs besides: installed when root and
# missing, else named. Debian and Ubuntu.
set -eu
missing=""
need() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || missing="$missing $2"; }
need sshd openssh-server
need ssh openssh-client
need rsync rsync
need ip iproute2
need iptables iptables
need sudo sudo
need nsenter util-linux
for extra in "$@"; do need "$extra" "$extra"; done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "testbed: missing packages:$missing (install them as root)" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing </dev/null >/dev/null
