"""TLS of the proxy's endpoint and of the connections to instances. A failure has a reason that names its remedy."""

import ssl
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from kvpipe.exceptions import ConfigError
from kvpipe.proxy.files import Reloaded, read

_OLDEST = ssl.TLSVersion.TLSv1_2
# Those of curl, with each version of Python, whose defaults are strict from 3.13 on: strict ones refuse CA certificates
# without keyUsage, which are common in companies. Any certificate in the file may end a chain.
_VERIFY_FLAGS = ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
# Codes of OpenSSL's x509_vfy.h.
_NOT_YET_VALID, _EXPIRED = 9, 10
_UNKNOWN_CA = {2, 18, 19, 20, 21}
_OTHER_HOST = {62, 64}
# A server that answers in HTTP: the first name is OpenSSL 3.0's, newer releases have the others, too.
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}


class _EncryptedKeyError(Exception):
    """OpenSSL asks for a passphrase."""


def server_context(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """The context of the proxy's endpoint; None without files. Handshakes use a renewed certificate within a second.

    Raises:
        ConfigError: the files cannot be read or used, or one is missing.
    """
    if certfile is None and keyfile is None:
        return None
    if keyfile is None:
        raise ConfigError(f"ssl_certfile={str(certfile)!r} without ssl_keyfile: name its private key (--ssl-keyfile)")
    if certfile is None:
        raise ConfigError(f"ssl_keyfile={str(keyfile)!r} without ssl_certfile: name its certificate (--ssl-certfile)")
    files = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    context = _RenewedContext(ssl.PROTOCOL_TLS_SERVER)
    context.latest = Reloaded(files, lambda contents: _load(certfile, keyfile, *contents))
    return context


class _RenewedContext(ssl.SSLContext):
    """Each connection is one of the latest context, which has its own sessions: none of a replaced one is resumed.

    To load a certificate into a context that is in use would leave it without a key where the two do not match.
    """

    latest: Reloaded[ssl.SSLContext]

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.latest.current().wrap_bio(*args, **options)


def instances_context(ca_file: Path | None) -> ssl.SSLContext:
    """The context of connections to instances whose certificates are signed by one of these CA certificates.

    Without a file those that the system trusts count.

    Raises:
        ConfigError: the file cannot be read, or has no certificate.
    """
    if ca_file is None:
        return _system_context()
    pem = read("instances_ca_file", ca_file).decode("ascii", errors="ignore")
    try:
        return _verifying(ssl.create_default_context(cadata=pem))
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "none is found"
        message = f"instances_ca_file={str(ca_file)!r} has no certificate in PEM form ({reason})"
        raise ConfigError(message) from error


@cache  # to load the system's certificates takes OpenSSL tenths of a second
def _system_context() -> ssl.SSLContext:
    return _verifying(ssl.create_default_context())


def _verifying(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = _OLDEST
    context.verify_flags = _VERIFY_FLAGS
    return context


def failure(error: ssl.SSLError) -> str:
    """Describes why an instance was not reached by TLS, with the remedy."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _refusal(error.verify_code, error.verify_message.rstrip("."))
    if error.reason in _NO_TLS:
        return "does not speak TLS: write http:// for it, or start it with --ssl-certfile and --ssl-keyfile"
    return f"TLS fails: {error.reason or type(error).__name__}"


def _refusal(code: int, text: str) -> str:
    if code in _UNKNOWN_CA:
        return f"its certificate is of an unknown CA ({text}): name the CA's own certificate by --instances-ca-file"
    if code in _OTHER_HOST:
        return f"its certificate is for another host ({text}): use a name of its subjectAltName, or add this one to it"
    if code == _EXPIRED:
        return f"its certificate is out of date ({text}): renew it, and restart vLLM if it lacks --enable-ssl-refresh"
    if code == _NOT_YET_VALID:
        return f"its certificate is not valid yet ({text}): compare the clocks of both hosts"
    return f"its certificate is refused ({text})"


def _load(certfile: Path, keyfile: Path, cert: bytes, key_content: bytes) -> ssl.SSLContext:
    _check("ssl_certfile", certfile, cert, b"-----BEGIN CERTIFICATE-----", "certificate")
    _check("ssl_keyfile", keyfile, key_content, b"PRIVATE KEY-----", "private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _OLDEST
    key = f"ssl_keyfile={str(keyfile)!r}"
    try:
        context.load_cert_chain(certfile, keyfile, password=_refuse_passphrase)
    except _EncryptedKeyError as error:
        remedy = f"write it without one: openssl pkey -in {keyfile} -out FILE"
        raise ConfigError(f"{key} is protected by a passphrase; {remedy}") from error
    except OSError as error:  # ssl.SSLError among them
        reason = getattr(error, "reason", None) or error.strerror
        if reason == "KEY_VALUES_MISMATCH":
            reason = "the key is not that of the file's first certificate; name the key that it was issued for"
        raise ConfigError(f"{key} with ssl_certfile={str(certfile)!r} cannot be used: {reason}") from error
    return context


def _check(name: str, path: Path, content: bytes, marker: bytes, what: str) -> None:
    if marker not in content:
        raise ConfigError(f"{name}={str(path)!r} has no {what} in PEM form")


def _refuse_passphrase() -> NoReturn:
    """Stands for OpenSSL's question at the terminal."""
    raise _EncryptedKeyError
