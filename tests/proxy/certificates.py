"""Authorities and certificates, made on the spot."""

import datetime as dt
import ssl
from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography.hazmat.primitives import serialization

HOST = "127.0.0.1"


class Certificate(NamedTuple):
    """A certificate of an authority, in files.

    Attributes:
        ca: the authority's own certificate.
        cert: the certificate.
        key: its private key.
    """

    ca: Path
    cert: Path
    key: Path

    @property
    def of_endpoint(self):
        """Settings of a proxy whose endpoint has it."""
        return {"ssl_certfile": self.cert, "ssl_keyfile": self.key}

    def server_context(self):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.cert, self.key)
        return context

    def client_context(self):
        return ssl.create_default_context(cafile=self.ca)


class Authority:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._num_issued = 0
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, host=HOST, not_after=None) -> Certificate:
        issued = self._authority.issue_cert(host, not_after=not_after)
        self._num_issued += 1
        cert, key = (self._folder / f"{kind}{self._num_issued}.pem" for kind in ("cert", "key"))
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return Certificate(self.ca, cert, key)

    def issue_expired(self) -> Certificate:
        return self.issue(not_after=dt.datetime.now(dt.UTC) - dt.timedelta(days=1))


def encrypted(key: Path) -> bytes:
    """The key, protected by a passphrase."""
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    protection = serialization.BestAvailableEncryption(b"secret")
    return loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
