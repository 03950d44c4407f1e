"""Values among vLLM's arguments."""

from collections.abc import Sequence

from kvpipe.exceptions import ConfigError

_TENSOR_FLAGS = ("--tensor-parallel-size", "-tp")
_SHUTDOWN_FLAGS = ("--shutdown-timeout",)
_DATA_FLAGS = ("--data-parallel-size", "-dp")


def value_of(args: Sequence[str], flags: Sequence[str]) -> str | None:
    """The value of the last of these flags, in either form; vLLM takes underscores, too."""
    found = None
    for at, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag.replace("_", "-") in flags:
            found = value if equals else next(iter(args[at + 1 : at + 2]), "")
    return found


def tensor_parallel_size(args: Sequence[str]) -> int:
    """Returns vLLM's setting of this name.

    Raises:
        ConfigError: It is no positive number.
    """
    return _size(args, _TENSOR_FLAGS)


def data_parallel_size(args: Sequence[str]) -> int:
    """As `tensor_parallel_size`."""
    return _size(args, _DATA_FLAGS)


def shutdown_timeout_s(args: Sequence[str]) -> int:
    """Returns vLLM's setting of this name: how long an instance may finish its requests after SIGTERM.

    Raises:
        ConfigError: It is no number.
    """
    return _number(args, _SHUTDOWN_FLAGS, least=0, default=0)


def _size(args: Sequence[str], flags: Sequence[str]) -> int:
    return _number(args, flags, least=1, default=1)


def _number(args: Sequence[str], flags: Sequence[str], *, least: int, default: int) -> int:
    value = value_of(args, flags)
    if value is None:
        return default
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{flags[0]} {value}: expected a number, {least} or more")
    return int(value)
