"""Addresses as text."""

_LAST_PORT = 65535


def join_host_port(host: str, port: int) -> str:
    """Returns `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host_port(text: str) -> bool:
    """True if a text is `host:port`, with an IPv6 address in brackets, and names a port."""
    host, colon, port = text.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not (host and colon and port.isdecimal()) or is_bare_ipv6 or "@" in host:
        return False
    return 0 < int(port) <= _LAST_PORT
