"""Addresses to listen on, and one clear line when one cannot be had."""

from __future__ import annotations

import errno
import logging
import os
import socket

from gateway.config import Address
from gateway.model import ConfigError

log = logging.getLogger("locum.receive")

_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


def bind(name: str, address: Address) -> socket.socket | None:
    """A socket bound to ``address`` for the setting ``name``, or None for ``::1`` where the host has no IPv6.

    Raises ``ConfigError`` when the address is taken, is no address of this host, or may not be used.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        if address.host == "::1" and error.errno in (*_NO_IPV6, socket.EAI_ADDRFAMILY):
            _tell_of_no_ipv6(address)
            return None
        raise _cannot(name, address, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(place)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        if address.host == "::1" and error.errno in _NO_IPV6:
            _tell_of_no_ipv6(address)
            return None
        raise _cannot(name, address, error) from None
    return bound


def _tell_of_no_ipv6(address: Address) -> None:
    log.info("event=no_ipv6 address=%s action=only IPv4 is served", address)


def _cannot(name: str, address: Address, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        hint = "is another gateway or DataKit running? stop it, or choose another port"
    elif error.errno == errno.EACCES:
        hint = "choose a port from 1024 on, or run as a user that may use this one"
    else:
        hint = "name an address of this host"
    # socket.gaierror numbers its errors differently from the rest of the system
    words = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return ConfigError(f"receive.{name}: cannot listen on {address} ({words}): {hint}")
