"""Addresses of this machine's interfaces."""

import socket
from pathlib import Path

import pytest

from tests.runs import HANG_S
from yatt.adapters.net.interface import IF_INET6, address_of, interface_of
from yatt.config.site import SiteConfig, load_site
from yatt.errors import ConfigError
from yatt.launch.node.network import listening_place, own_address

ipv6 = pytest.mark.skipif(not IF_INET6.exists(), reason="no IPv6 on this machine")


def test_ipv4_unless_asked() -> None:
    assert address_of("lo") == address_of("lo", 4) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert own_address(SiteConfig(interface="lo"), {}) == "127.0.0.1"
    assert interface_of("192.0.2.7") == interface_of("2001:db8::7") == ""
    with pytest.raises(OSError, match=r"\w"):
        address_of("ib7")


@ipv6
def test_ipv6() -> None:
    assert address_of("lo", 6) == "::1"
    assert interface_of("::1") == "lo"
    site = SiteConfig(interface="lo", ip_version=6)
    assert own_address(site, {}) == "::1"
    assert own_address(SiteConfig(), {"SLURM_LAUNCH_NODE_IPADDR": "::1"}) == "::1"
    with listening_place("::1") as server:
        socket.create_connection(server.getsockname()[:2], timeout=HANG_S).close()
    with pytest.raises(ConfigError, match="'ib7' has no IPv6 address"):
        own_address(SiteConfig(interface="ib7", ip_version=6), {})


def test_an_interface_with_ipv6_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel lists it: a link-local address first, which nobody elsewhere can use as it is."""
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     ib7\n"
        "20010db8000000000000000000000002 04 40 00 82     ib7\n"
    )
    monkeypatch.setattr("yatt.adapters.net.interface.IF_INET6", listed)
    assert address_of("ib7") == address_of("ib7", 6) == "2001:db8::2"
    with pytest.raises(OSError, match=r"\w"):
        address_of("ib7", 4)
    with pytest.raises(OSError, match="no IPv6 address"):
        address_of("lo", 6)
    listed.unlink()
    with pytest.raises(OSError, match=r"\w"):
        address_of("ib7")


@pytest.mark.parametrize(
    ("text", "says"),
    [("ip_version: 6", "write `interface` as well"), ("interface: lo\nip_version: 5", "write 4, 6, or 0")],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_site(file)
