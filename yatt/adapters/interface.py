"""Network interfaces of this host and their IPv4 addresses."""

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """IPv4 address of an interface.

    Raises:
        OSError: there is no such interface, or it has no address.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])


def interface_of(address: str) -> str:
    """Name of the interface with this IPv4 address; empty if none has it."""
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except OSError:
            continue
    return ""
