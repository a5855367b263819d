"""Connections that notice a machine that has died: TCP keep-alive, without a limit on how long an answer may take."""

import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

DEAD_AFTER_S = 60
"""Seconds after which a connection fails if the other machine has died or cannot be reached."""
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # Linux's names (man 7 tcp). Other systems use their own intervals.
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", DEAD_AFTER_S // 2),
            ("TCP_KEEPINTVL", DEAD_AFTER_S // 6),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 1000 * DEAD_AFTER_S),  # no probes are sent while data is not acknowledged
        )
        if hasattr(socket, name)
    ),
]
OF_TRANSPORT = ("verify", "cert", "trust_env", "http1", "http2", "limits")
"""Options that httpx ignores when a client is given a transport; the transport gets them instead."""


def with_keep_alive(transport: Callable[..., Any], url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an httpx client for `url`, and a transport that sends keep-alive probes.

    A transport in `options` and a proxy in the environment take precedence; their connections send no probes.

    Args:
        transport: `httpx.HTTPTransport` or `httpx.AsyncHTTPTransport`.
    """
    if "transport" in options or (options.get("trust_env", True) and _has_proxy(httpx.URL(url))):
        return dict(options)
    own = {name: options[name] for name in OF_TRANSPORT if name in options}
    return {**options, "transport": transport(socket_options=SOCKET_OPTIONS, **own)}


def _has_proxy(url: httpx.URL) -> bool:
    return not getproxies().keys().isdisjoint((url.scheme, "all")) and not proxy_bypass(url.host)
