# What a node needs before and when Ray starts. The cluster files source it over SSH, on every node:
#
#   . ~/raybench/clusters/node.sh && raybench_setup          once: disk, firewall, driver, clock, Python, raybench
#   . ~/raybench/clusters/node.sh && raybench_env NAME && raybench_stop && ray start ...
#                                                            NAME is an environment of nccl.yaml
#
# It may run again at any time: what is there already is left as it is. Works on Oracle Linux, Amazon Linux, RHEL and its
# kin, Ubuntu and Debian, as root or as a user with sudo. bash.

RAYBENCH_SOURCE=$HOME/raybench
# An image of one's own may carry everything ready-made here; else a virtual environment is made in the home.
RAYBENCH_VENV=/opt/raybench/venv
[ -x "$RAYBENCH_VENV/bin/python" ] || RAYBENCH_VENV=$HOME/.raybench/venv

_raybench_say() { echo "raybench: $*" >&2; }
_raybench_sudo() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

# The interface that carries Ray: the one towards the head node, or on the head the one towards the world, as Ray chooses.
_raybench_interface() {
    local route
    route=$(ip -o -4 route get "${RAY_HEAD_IP:-8.8.8.8}" 2>/dev/null || ip -o -4 route show default | head -n 1)
    echo "$route" | sed -n 's/.* dev \([^ ]*\).*/\1/p'
}

# The boot volume may be larger than the partition that the image came with.
_raybench_disk() {
    if [ -x /usr/libexec/oci-growfs ]; then
        _raybench_sudo /usr/libexec/oci-growfs -y >/dev/null 2>&1 || _raybench_say "the root file system was not grown"
    fi
}

# Cloud images refuse everything but SSH. Nodes must reach each other on any port (Ray, gloo and NCCL choose theirs), so the
# node's own subnet is let in, and nothing else.
_raybench_firewall() {
    local interface subnet
    interface=$(_raybench_interface)
    subnet=$(ip -o -4 route show dev "$interface" proto kernel scope link | awk '{print $1; exit}')
    [ -n "$subnet" ] || { _raybench_say "no subnet on interface '$interface'"; return 1; }
    if command -v firewall-cmd >/dev/null 2>&1 && _raybench_sudo firewall-cmd --state >/dev/null 2>&1; then
        _raybench_sudo firewall-cmd --quiet --zone=trusted --add-source="$subnet" &&
            _raybench_sudo firewall-cmd --quiet --permanent --zone=trusted --add-source="$subnet"
    elif _raybench_sudo iptables -S INPUT 2>/dev/null | grep -qE 'REJECT|DROP'; then
        _raybench_sudo iptables -C INPUT -s "$subnet" -j ACCEPT 2>/dev/null ||
            _raybench_sudo iptables -I INPUT 1 -s "$subnet" -j ACCEPT || return 1
        if command -v netfilter-persistent >/dev/null 2>&1; then
            _raybench_sudo netfilter-persistent save >/dev/null 2>&1 || _raybench_say "firewall rule not kept for reboots"
        fi
    fi
}

# A GPU without a working driver: install it where the system can, else say which image has it.
_raybench_driver() {
    grep -qs 0x10de /sys/bus/pci/devices/*/vendor || return 0
    nvidia-smi -L >/dev/null 2>&1 && return 0
    if command -v ubuntu-drivers >/dev/null 2>&1 || command -v apt-get >/dev/null 2>&1; then
        _raybench_say "installing the NVIDIA driver (minutes)"
        _raybench_sudo env DEBIAN_FRONTEND=noninteractive sh -c \
            'apt-get update -q && apt-get install -yq ubuntu-drivers-common && ubuntu-drivers install --gpgpu' >/dev/null 2>&1
        _raybench_sudo modprobe nvidia 2>/dev/null
        nvidia-smi -L >/dev/null 2>&1 && return 0
    fi
    _raybench_say "there is a GPU but nvidia-smi does not work: use an image that carries the driver (docs/clusters.md)"
    return 1
}

# Times of several nodes are compared, so their clocks must be set by a server; raybench measures what offset remains.
_raybench_clock() {
    command -v timedatectl >/dev/null 2>&1 || return 0
    [ "$(timedatectl show -p NTPSynchronized --value 2>/dev/null)" = no ] || return 0
    _raybench_sudo systemctl enable --now chronyd >/dev/null 2>&1 ||
        _raybench_sudo systemctl enable --now chrony >/dev/null 2>&1 ||
        _raybench_sudo timedatectl set-ntp true >/dev/null 2>&1 ||
        _raybench_say "the clock is not synchronised; times across nodes will carry a larger error"
}

# Some Python from 3.11 on; the distribution's, installed if there is none.
_raybench_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    [ "${1:-}" = again ] && { _raybench_say "no Python from 3.11 on, and none could be installed"; return 1; }
    if command -v dnf >/dev/null 2>&1; then
        _raybench_sudo dnf install -yq python3.11 python3.11-pip >/dev/null 2>&1
    elif command -v apt-get >/dev/null 2>&1; then
        _raybench_sudo env DEBIAN_FRONTEND=noninteractive sh -c \
            'apt-get update -q && apt-get install -yq python3.11-venv || apt-get install -yq python3-venv' >/dev/null 2>&1
    fi
    _raybench_python again
}

# raybench and what it runs on, in the versions of constraints.txt: a number means nothing without them.
_raybench_install() {
    local python pip
    if [ ! -x "$RAYBENCH_VENV/bin/python" ]; then
        python=$(_raybench_python) || return 1
        "$python" -m venv "$RAYBENCH_VENV" || return 1
    fi
    pip="$RAYBENCH_VENV/bin/python -m pip install -q --no-input --disable-pip-version-check -c $RAYBENCH_SOURCE/constraints.txt"
    "$RAYBENCH_VENV/bin/python" -c 'import hatchling' 2>/dev/null || $pip hatchling || return 1
    $pip --no-build-isolation "$RAYBENCH_SOURCE[oci]" || return 1
    $pip --no-build-isolation "$RAYBENCH_SOURCE[peers]" >/dev/null 2>&1 ||
        _raybench_say "not every peer library could be installed; their cases will be skipped"
}

# Shells on the node (`ray attach`, `ray exec`, jobs) find raybench and Ray's token.
_raybench_shells() {
    local line=". ~/raybench/clusters/node.sh && raybench_env"
    grep -qsF "$line" ~/.bashrc || echo "[ ! -f ~/raybench/clusters/node.sh ] || { $line; }" >>~/.bashrc
    [ ! -f ~/.ray/auth_token ] || { chmod 700 ~/.ray && chmod 600 ~/.ray/auth_token; }
}

raybench_setup() {
    _raybench_disk
    _raybench_clock
    _raybench_firewall && _raybench_driver && _raybench_install && _raybench_shells
}

raybench_env() {
    local interface
    export VIRTUAL_ENV=$RAYBENCH_VENV PATH=$RAYBENCH_VENV/bin:$PATH
    # Ray asks every client for the token in ~/.ray/auth_token, so that an open port is no open door.
    export RAY_AUTH_MODE=token
    [ -z "${1:-}" ] || export RAYBENCH_NCCL_ENV=$1
    # `ray up` sets one thread for everything that it starts; raybench sets what each case says.
    unset OMP_NUM_THREADS PYTHONWARNINGS
    # The names differ from node to node, and gloo would otherwise take what the host name resolves to.
    interface=$(_raybench_interface)
    [ -z "$interface" ] || export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME="=$interface"
    # Every worker process opens many files; RDMA locks memory.
    ulimit -n "$(ulimit -Hn)" 2>/dev/null
    ulimit -l unlimited 2>/dev/null
    return 0
}

# End a Ray that runs here already, as `ray up` on a running cluster wants it.
raybench_stop() {
    local follower
    follower=$(cat ~/.raybench/follower 2>/dev/null)
    if [ -n "$follower" ] && grep -qs 'ray stop' "/proc/$follower/cmdline"; then kill "$follower"; fi
    rm -f ~/.raybench/follower
    if pgrep -x raylet >/dev/null 2>&1 || pgrep -x gcs_server >/dev/null 2>&1; then ray stop; fi
}

# For workers that outlive their cluster: `ray down` reaches only the head of an on-premise cluster. The worker's raylet ends
# when it misses the head; this waits for that and ends what Ray forgets.
raybench_follow() {
    local raylet
    raylet=$(pgrep -x raylet | head -n 1)
    [ -n "$raylet" ] || return 0
    mkdir -p ~/.raybench
    setsid bash -c "echo \$\$ >~/.raybench/follower; while kill -0 $raylet; do sleep 2; done; exec ray stop" \
        </dev/null >/dev/null 2>&1 &
}
