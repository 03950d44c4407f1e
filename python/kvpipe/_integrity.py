"""The arguments `integrity`, and `checksum`, which it replaces."""

from __future__ import annotations

import warnings

from kvpipe.exceptions import ConfigError

AUTO = "auto"
_OF_CHECKSUM = {True: AUTO, False: "none"}


def resolve_integrity(
    choices: tuple[str, ...], *, integrity: str | None, checksum: bool | None, no_validate: str = ""
) -> str:
    """Returns the integrity that a caller has chosen, by default `auto`.

    Args:
        choices: The values that the callee knows.
        integrity: The argument of this name.
        checksum: The deprecated argument of this name.
        no_validate: Reason for which `validate` is not supported; empty if it is.

    Raises:
        ConfigError: Both arguments are given, or the value is not one of the choices.
    """
    if checksum is not None:
        if integrity is not None:
            message = f"checksum={checksum!r} and integrity={integrity!r}: write only integrity"
            raise ConfigError(message)
        if not isinstance(checksum, bool):
            message = f"checksum={checksum!r}: expected True or False; write integrity instead"
            raise ConfigError(message)
        integrity = _OF_CHECKSUM[checksum]
        message = f'checksum={checksum} is deprecated: write integrity="{integrity}"'
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    chosen = AUTO if integrity is None else integrity
    if chosen in choices:
        return chosen
    reason = f": {no_validate}" if chosen == "validate" and no_validate else ""
    message = f"integrity={chosen!r}{reason}; write one of {', '.join(choices)}"
    raise ConfigError(message)
