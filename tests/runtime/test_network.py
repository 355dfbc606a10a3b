"""Addresses: of interfaces and names, never of all at once, and the one on the way to another machine."""

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.network import address_of, address_towards, bind, device_of


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


def test_a_socket_is_bound_where_the_settings_say_or_their_keys_are_named():
    with bind("127.0.0.1", 0, keys="gateway.") as first:
        port = first.getsockname()[1]
        first.listen()
        with pytest.raises(ConfigError, match=rf"gateway\.port is {port}: .*in use\. gateway\.port = 0 takes a free one"):
            bind("127.0.0.1", port, keys="gateway.")
    for nowhere in ("203.0.113.9", "no.such.host.invalid", "ib 7", "x" * 70):
        with pytest.raises(ConfigError, match=rf"tinker\.interface is {nowhere}: cannot listen there: .*\. Name one of .*127\.0\.0\.1"):
            bind(nowhere, 0, keys="tinker.")
