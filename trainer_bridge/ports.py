"""Ports that nobody has."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """One of this machine, at that address."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
