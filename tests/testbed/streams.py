"""What TCP carries between two hosts, measured by a stream of zeros."""

from __future__ import annotations

import subprocess
import sys

from tests.testbed.host import Host

RECEIVE = """
import socket, sys, time
ahead = int(sys.argv[2]) << 20
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
connection, _ = server.accept()
total, begin = 0, None
while data := connection.recv(1 << 20):
    if begin is not None:
        total += len(data)
    elif (ahead := ahead - len(data)) <= 0:
        begin = time.perf_counter()
print(total / (time.perf_counter() - begin))
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for _ in range(int(sys.argv[3])):
    connection.sendall(bytes(1 << 20))
"""


def streams(*pairs: tuple[Host, Host], megabytes: int, ahead: int = 0) -> list[float]:
    """Bytes a second of one TCP stream from the first to the second host of each pair, all at the same time.

    Args:
        ahead: of `megabytes`, those after which the clock starts: what a shaper lets through at once is not its rate.
    """
    running = []
    for number, (sender, receiver) in enumerate(pairs):
        port = str(7000 + number)
        for host in (sender, receiver):
            host.run("iptables", "-F", "INPUT")
        listening = receiver.namespace.enter([sys.executable, "-c", RECEIVE, port, str(ahead)])
        process = subprocess.Popen(listening, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        sending = [sys.executable, "-c", SEND, receiver.internal_ip, port, str(megabytes)]
        running.append((process, sender.namespace.enter(sending)))
    senders = [subprocess.Popen(command) for _, command in running]
    speeds = [float(process.communicate(timeout=120)[0]) for process, _ in running]
    assert [sender.wait(timeout=60) for sender in senders] == [0] * len(senders)
    return speeds
