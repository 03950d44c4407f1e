"""Addresses as text."""


def join_host_port(host: str, port: int) -> str:
    """Returns `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
