"""State of one attempt at a handoff."""

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
    """One attempt at a handoff from one P to one D, under an id of its own.

    Attributes:
        may_hold_kv: P may hold blocks for this handoff, so a failed attempt has to release them.
        prefilling: the exchange with P, when it runs beside the one with D.
        early_token: P's token or None, once P has answered; unset where the proxy cannot stream it early.
        repeats_token: whether D's stream will begin with that token.
        timing: timing of D's part, with just-in-time dispatch.
        is_decode_asked: the request has been sent to D.
        measuring: the task that measures D's admission.
        is_settled: the attempt has ended, and its timing has been logged.
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
        """Set the result of P's answer: its token, or None."""
        if self.early_token is not None and not self.early_token.done():
            self.early_token.set_result(token)

    def end_timing(self) -> None:
        """Stop measuring, and log the timing once."""
        if self.measuring is not None:
            self.measuring.cancel()
        if self.timing is not None and not self.is_settled:
            fields = " ".join(f"{name}={value}" for name, value in self.timing.report().items())
            logger.debug("handoff.dispatch handoff=%s %s", self.handoff, fields)
