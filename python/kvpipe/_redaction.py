"""URLs in messages and logs: `redact`."""

from __future__ import annotations

import re

# A name, an IPv6 address in brackets, with a port or without; or an IPv6 address that lacks the brackets.
_HOST = r"(?:(?:\[[\w:.%]*\]|[^\s:@/?#\[\],]*)(?::\d*)?|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*)"
# A user's class of a store may stand before a URL.
_SCHEME = r"(?:[A-Za-z_][\w.]*:[A-Za-z_]\w*:)?[A-Za-z][\w+.-]*://"
_URL = re.compile(rf"({_SCHEME})([^@/?#\s]*@)?({_HOST}(?:,{_HOST})*(?:[/?#][^@]*)?)", re.DOTALL)


def redact(url: str) -> str:
    """Returns the part of a URL that a message may quote, which never has a password.

    Where a password would have to be percent-encoded and is not, a part of it may be anywhere: only the scheme is left.
    """
    if "://" not in url and "@" not in url:
        return url
    found = _URL.fullmatch(url)
    if found is None:
        begin = re.match(_SCHEME, url)
        return f"{begin[0] if begin else ''}…"
    scheme, login, rest = found.groups("")
    user, colon, _ = login.partition(":")
    return f"{scheme}{f'{user}:' if colon else ''}{'…@' if login else ''}{rest}"
