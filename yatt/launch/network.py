"""The address under which other nodes of the job reach this one."""

import socket
from collections.abc import Mapping

from yatt.adapters.interface import address_of
from yatt.errors import ConfigError

ANY_PORT = 9


def own_address(interface: str, env: Mapping[str, str]) -> str:
    """IPv4 address of `interface`; without a name, of whichever has the route to the job's first node.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    if interface:
        return _address_of(interface)
    leader = env.get("SLURM_LAUNCH_NODE_IPADDR") or env.get("SLURM_SRUN_COMM_HOST") or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((leader, ANY_PORT))  # sends nothing: it only asks for the route
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    try:
        return address_of(interface)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"site interface: '{interface}' has no IPv4 address on {socket.gethostname()} "
            f"({error.strerror}); there are {known}."
        ) from error
