"""A store in Valkey or Redis. A cluster needs redis-py: `pip install 'kvpipe[valkey]'`."""

from kvpipe.store.valkey.settings import ValkeySettings
from kvpipe.store.valkey.store import ValkeyStore

__all__ = ["ValkeySettings", "ValkeyStore"]
