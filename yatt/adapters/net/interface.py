"""Network interfaces of this host and their addresses."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
IF_INET6 = Path("/proc/net/if_inet6")
LINK_LOCAL = 0x20
"""Scope of link-local addresses, which also need an interface to be reached."""


def address_of(interface: str, version: int = 0) -> str:
    """Returns the address of an interface: IPv4, or IPv6 if it has no IPv4 address, unless `version` is set.

    Raises:
        OSError: the interface does not exist, or has no such address.
    """
    missing = OSError(0, "no IPv6 address")
    if version != 6:
        try:
            return _ipv4_of(interface)
        except OSError as error:
            missing = error
    if version != 4 and (found := _ipv6_of(interface)):
        return found
    raise missing


def interface_of(address: str) -> str:
    """Returns the name of the interface with this address; empty if none has it."""
    version = 6 if ":" in address else 4
    for _, name in socket.if_nameindex():
        try:
            if address_of(name, version) == address:
                return name
        except OSError:
            continue
    return ""


def _ipv4_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])


def _ipv6_of(interface: str) -> str:
    """Returns the first IPv6 address that is not link-local; empty if there is none."""
    try:
        lines = IF_INET6.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:  # address, index, prefix length, scope, flags, name
        address, _, _, scope, _, name = line.split()
        if name == interface and int(scope, 16) != LINK_LOCAL:
            return str(ipaddress.IPv6Address(bytes.fromhex(address)))
    return ""
