"""Addresses: of interfaces and names, never of all at once, and the one on the way to another machine."""

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.network import address_of, address_towards, device_of


@pytest.mark.parametrize("interface", ["127.0.0.1", "lo", "localhost"])
def test_an_address_an_interface_and_a_name_lead_to_an_address(interface: str):
    assert address_of(interface) == "127.0.0.1"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "0"])
def test_nobody_listens_on_all_addresses(everywhere: str):
    with pytest.raises(ConfigError, match="is every address of this machine"):
        address_of(everywhere)


@pytest.mark.parametrize("nothing", ["ib77", "no.such.host.invalid", "*", "999.1.1.1"])
def test_what_names_no_address_is_refused_with_what_there_is(nothing: str):
    with pytest.raises(ConfigError, match=r"no IPv4 address, host name or interface here \(there are .*lo"):
        address_of(nothing)


def test_the_way_to_this_machine_leaves_from_loopback():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert device_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"no interface of this machine has the address 203\.0\.113\.9"):
        device_of("203.0.113.9")
