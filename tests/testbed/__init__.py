"""Real hosts on one machine, and an OCI API whose instances they are.

A host is a process tree in Linux namespaces of its own (network, PID, mount, UTS, IPC) that runs sshd over a private,
writable copy of the machine's root: `ray up` cannot tell it from a rented machine. Hosts hang on a switch that exists
only in a namespace; nothing is reachable from outside, nothing of the machine's own network is touched, and everything
goes when the process that made it goes. See `python -m tests.testbed --help` to play with one.
"""
