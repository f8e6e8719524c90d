"""The address at which other nodes of the job reach this node."""

import socket
from collections.abc import Mapping

from yatt.adapters.net.interface import address_of
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError

ANY_PORT = 9


def own_address(site: SiteConfig, env: Mapping[str, str]) -> str:
    """Returns the address of the site's `interface`; if unset, of the one that routes to the job's first
    node.

    Raises:
        ConfigError: the interface does not exist, or has no address of the wanted IP version.
        OSError: there is no route.
    """
    if site.interface:
        return _address_of(site.interface, site.ip_version)
    leader = env.get("SLURM_LAUNCH_NODE_IPADDR") or env.get("SLURM_SRUN_COMM_HOST") or "127.0.0.1"
    family, *_, place = socket.getaddrinfo(leader, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing: it only looks up the route
        return str(probe.getsockname()[0])


def listening_place(address: str, backlog: int | None = None) -> "socket.socket":
    """Returns a socket that listens on a free port of `address`; `backlog` limits the waiting connections.

    Raises:
        OSError: the socket cannot be created.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def _address_of(interface: str, version: int) -> str:
    try:
        return address_of(interface, version)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        kind = f"IPv{version} address" if version else "address"
        raise ConfigError(
            f"site interface: '{interface}' has no {kind} on {socket.gethostname()} "
            f"({error.strerror}); its interfaces are {known}."
        ) from error
