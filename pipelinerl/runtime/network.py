"""Addresses of this machine: a process listens on one of them, never on all, and others reach it there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct

from pipelinerl.errors import ConfigError

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def address_of(interface: str) -> str:
    """The IPv4 address that `interface` names: itself, a network interface (`ib0`), or a host name.

    Raises `ConfigError` for what names none, and for 0.0.0.0: a run listens where it is meant to be reached, and nowhere else.
    """
    if interface in (name for _, name in socket.if_nameindex()):
        found = _address_of_device(interface)
    else:
        try:
            found = socket.getaddrinfo(interface, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        except (OSError, UnicodeError):
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(f"run.interface: {interface!r} is no IPv4 address, host name or interface here (there are {names})") from None
    if ipaddress.ip_address(found).is_unspecified:
        raise ConfigError(f"run.interface: {interface} is every address of this machine; name the one that the other machines reach")
    return str(found)


def bind(interface: str, port: int, *, keys: str) -> socket.socket:
    """Return a TCP socket at an address, or a host name, of this machine; port 0 takes a free one.

    Raises `ConfigError` naming the settings that begin with `keys` ("gateway."): `interface`, and `port`.
    """
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((interface, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        why = error.strerror or str(error) if isinstance(error, OSError) else "no name of a host"
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"{keys}port is {port}: cannot listen there on {interface}: {why}. {keys}port = 0 takes a free one") from None
        known = ", ".join(sorted(_addresses()))
        do = f"Name one of {known}, or a host name that leads to one"
        raise ConfigError(f"{keys}interface is {interface}: cannot listen there: {why}. {do}") from None
    return listener


def address_towards(host: str, port: int = 9) -> str:
    """This machine's IPv4 address on the way to another one. Sends nothing. Raises `ConfigError` where no way leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConfigError(f"no way leads from this machine to {host}: {error.strerror or error}") from None
        return str(probe.getsockname()[0])


def device_of(address: str) -> str:
    """The network interface of this machine that has an address. Raises `ConfigError` where none has."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):
            if _address_of_device(name) == address:
                return name
    raise ConfigError(f"no interface of this machine has the address {address}")


def _addresses() -> list[str]:
    """The IPv4 addresses of this machine's interfaces."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):
            found.append(_address_of_device(name))
    return found


def _address_of_device(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise ConfigError(f"run.interface: {name} has no IPv4 address: {error.strerror}") from None
    return socket.inet_ntoa(answer[20:24])
