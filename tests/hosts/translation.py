"""A way to a host by an address that no interface has: a host between translates it, as a router or Kubernetes does.

`python -m tests.hosts.translation ADDRESS TARGET` makes the network that it runs in translate. It sends nftables' own
messages, because more machines have that part of the kernel than the program `nft`.
"""

import os
import socket
import struct
import sys
from ipaddress import ip_address

from tests.hosts.namespaces import Host, run_here, two_addresses

# linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
_NETLINK_NETFILTER = 12
_ERROR, _BATCH_BEGIN, _BATCH_END = 2, 16, 17
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_NFTABLES, _NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 10, 0, 3, 6
_IPV4, _NESTED, _PREROUTING, _BEFORE_ROUTING = 2, 0x8000, 0, -100
_NETWORK_HEADER, _DESTINATION, _EQUAL, _REGISTER, _TRANSLATE_DESTINATION = 1, (16, 4), 0, 1, 1


class Translation:
    """A way from here to a host, until it is closed.

    `near` is the address of this end; `address` is translated to `target`, that of the host, to which no route leads.

    Raises:
        OSError: This kernel does not translate; the message says why.
    """

    def __init__(self, host):
        self._between = Host()
        try:
            self._join(host)
        except BaseException:
            self.close()
            raise

    def _join(self, host):
        between = self._between
        outer, inner = between.cable(), host.cable(between)
        self.near, self.target, self.address = outer.near, inner.far, two_addresses()[0]
        between.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        between.run(sys.executable, "-m", __name__, self.address, self.target)
        run_here("ip", "route", "add", self.address, "via", outer.far)
        host.run("ip", "route", "add", self.near, "via", inner.near)

    def close(self):
        self._between.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _attribute(kind, value):
    match value:
        case int():
            value = struct.pack(">I", value & 0xFFFFFFFF)
        case str():
            value = value.encode() + b"\0"
        case list():
            kind, value = kind | _NESTED, b"".join(_attribute(*each) for each in value)
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _message(kind, flags, *attributes, subsystem=0):
    body = struct.pack(">BBH", _IPV4, 0, subsystem) + b"".join(_attribute(*each) for each in attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 0, 0) + body


def _expression(name, *attributes):
    return 1, [(1, name), (2, list(attributes))]


def translate(address, target):
    """Packets to one address go to another one from now on, and the answers come from the first.

    Raises:
        OSError: The kernel does not do that.
    """
    of_nftables = _NFTABLES << 8
    packed, packed_target = ip_address(address).packed, ip_address(target).packed
    offset, length = _DESTINATION
    rule = [  # numbered as NFTA_PAYLOAD_DREG and so on
        _expression("payload", (1, _REGISTER), (2, _NETWORK_HEADER), (3, offset), (4, length)),
        _expression("cmp", (1, _REGISTER), (2, _EQUAL), (3, [(1, packed)])),
        _expression("immediate", (1, _REGISTER), (2, [(1, packed_target)])),
        _expression("nat", (1, _TRANSLATE_DESTINATION), (2, _IPV4), (3, _REGISTER)),
    ]
    hook = [(1, _PREROUTING), (2, _BEFORE_ROUTING)]
    messages = (
        _message(_BATCH_BEGIN, 0, subsystem=_NFTABLES),
        _message(of_nftables | _NEW_TABLE, _CREATE, (1, "kvpipe")),
        _message(of_nftables | _NEW_CHAIN, _CREATE, (1, "kvpipe"), (3, "in"), (4, hook), (7, "nat")),
        _message(of_nftables | _NEW_RULE, _CREATE | _ACK, (1, "kvpipe"), (2, "in"), (4, rule)),
        _message(_BATCH_END, 0, subsystem=_NFTABLES),
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as kernel:
        kernel.send(b"".join(messages))
        # The first answer is the first error, or the acknowledgement of the rule.
        _, kind, _, _, _, status = struct.unpack_from("=IHHIIi", kernel.recv(1 << 16))
    assert kind == _ERROR
    if status:
        raise OSError(-status, os.strerror(-status))


if __name__ == "__main__":
    try:
        translate(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"nftables translate no addresses: {error.strerror}")
