"""One attempt at a handoff."""

import asyncio
import logging
import secrets
from dataclasses import dataclass, field

from kvpipe.proxy.early_token import EarlyToken
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import Timing
from kvpipe.proxy.upstream import Answer

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at a handoff from one P to one D, under an id of its own.

    Attributes:
        may_hold_kv: P may hold blocks for this handoff, so that it has to be told if it fails.
        prefilling: P's exchange, when it runs beside D's.
        early_token: what P has sampled, where that can be shown before D says it.
        repeats_token: whether D's stream will begin with that.
        timing: how D's part is timed, with just-in-time dispatch.
        is_decode_asked: D has been asked, whether it answered or not.
        measuring: waits for D's admission.
        is_settled: it has ended, and its timing has been logged.
    """

    prefill: Instance
    decode: Instance
    handoff: str = field(default_factory=lambda: secrets.token_hex(16))
    may_hold_kv: bool = False
    prefilling: asyncio.Task[Answer | None] | None = None
    early_token: asyncio.Future[EarlyToken | None] | None = None
    repeats_token: asyncio.Task[bool] | None = None
    timing: Timing | None = None
    is_decode_asked: bool = False
    measuring: asyncio.Task[None] | None = None
    is_settled: bool = False

    def set_early_token(self, token: EarlyToken | None) -> None:
        """P has answered, with this token or none."""
        if self.early_token is not None and not self.early_token.done():
            self.early_token.set_result(token)

    def end_timing(self) -> None:
        """Stop measuring, and log the timing once."""
        if self.measuring is not None:
            self.measuring.cancel()
        if self.timing is not None and not self.is_settled:
            fields = " ".join(f"{name}={value}" for name, value in self.timing.report().items())
            logger.debug("handoff.dispatch handoff=%s %s", self.handoff, fields)
