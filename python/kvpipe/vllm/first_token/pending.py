"""First tokens on their way from the worker role to the logits processor of the same process."""

from __future__ import annotations


class PendingFirstTokens:
    """First tokens of the requests with outputs to force in the current step of each engine of this worker process.

    The scheduler role has accepted a request's further tokens with its first one.

    Attributes:
        has_processor: True if this process has a processor that forces them.
    """

    def __init__(self) -> None:
        self.has_processor = False
        self._by_connector: dict[str, dict[str, dict[bytes, int]]] = {}
        self._by_engine: dict[str, dict[bytes, int]] = {}

    def set(self, engine_id: str, connector: str, tokens: dict[bytes, int]) -> None:
        """Sets the tokens of one connector of an engine; under MultiConnector there may be two."""
        connectors = self._by_connector.setdefault(engine_id, {})
        connectors[connector] = tokens
        self._by_engine[engine_id] = {handoff: token for each in connectors.values() for handoff, token in each.items()}

    def of(self, engine_id: str) -> dict[bytes, int]:
        """Returns an engine's tokens, by handoff."""
        return self._by_engine.get(engine_id, {})


# Global, because vLLM makes the processor and the worker role, and neither has a reference to the other.
PENDING_FIRST_TOKENS = PendingFirstTokens()
