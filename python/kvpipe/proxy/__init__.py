"""One OpenAI-compatible endpoint over X prefill and Y decode instances.

`run(ProxyConfig(...))` serves until a signal; `create_app` returns the application for embedding.
"""

from kvpipe.proxy.app import create_app
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.control import Control
from kvpipe.proxy.environment import Environment
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.server import run, serve

__all__ = ["Control", "Environment", "Instance", "ProxyConfig", "create_app", "run", "serve"]
