"""Sockets that wait for this run's other processes: at one address where that can be had. Imports no torch."""

import ipaddress
import socket

from lockstep.distributed.cluster import Cluster

BACKLOG = 1024


def listen(cluster: Cluster) -> socket.socket:
    """A listening socket at MASTER_PORT of node 0.

    It is bound to the address of MASTER_ADDR alone. On all interfaces only where that is none of this machine's (the
    network translates it), or a name that stands for several addresses, or between nodes for loopback.

    Raises:
        OSError: the port is taken.
    """
    port = cluster.master_port or 0
    address = own_address(cluster)
    if address is None:
        return socket.create_server(("", port), backlog=BACKLOG)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def own_address(cluster: Cluster) -> str | None:
    """The one address of this machine by which the others reach it; None where MASTER_ADDR does not tell."""
    try:
        found = socket.getaddrinfo(cluster.master_addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = {str(entry[4][0]) for entry in found}
    if len(addresses) != 1:
        return None
    address = addresses.pop()
    named = address != cluster.master_addr
    if cluster.num_nodes > 1 and named and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None  # many a /etc/hosts gives the machine's own name 127.0.1.1, where no other node comes
    return address if _can_be_bound(address) else None


def _can_be_bound(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
