"""Has D answer what P has computed into the store that both share: P's token may reach the client before D's stream."""

import secrets
from dataclasses import dataclass

from kvpipe.proxy.bodies import loading_body, resumed_body
from kvpipe.proxy.descriptions import Describe
from kvpipe.proxy.early_token import EarlyToken, allows_early_token, repeats_first_token
from kvpipe.proxy.exchanges import Call, Exchanges
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.prefill_answer import PrefillAnswer
from kvpipe.proxy.resumption import Resumption
from kvpipe.proxy.retries import Retries
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Answer, failed


@dataclass(frozen=True, slots=True)
class Saved:
    """What P has left in the store for one D.

    Attributes:
        handoff: id of its entry.
        early_token: its token, if the client may have it before D's stream.
    """

    handoff: str
    early_token: EarlyToken | None

    @classmethod
    def of(cls, handoff: str, prefilled: PrefillAnswer, call: Call) -> "Saved | None":
        """What P's answer reports of the handoff that it was asked to save; None if it saves nothing."""
        if prefilled.saved != handoff:
            return None
        return cls(handoff, EarlyToken.of(call.path, prefilled.fields) if allows_early_token(call.body) else None)

    def early_at(self, described: dict[str, object] | None, path: str) -> EarlyToken | None:
        """The token, if a D of this description repeats it, so that the client can have it before the stream."""
        return self.early_token if repeats_first_token(described, path) else None


class StoreRequests:
    """Requests to D's that share a store with P's.

    Args:
        exchanges: exchanges with instances.
        describe: descriptions of D's engines.
        metrics: counters of attempts.
        tasks: owner of the tasks that wait for the first bytes of streams.
    """

    def __init__(self, exchanges: Exchanges, describe: Describe, metrics: Metrics, tasks: OwnedTasks) -> None:
        self._exchanges = exchanges
        self._describe = describe
        self._metrics = metrics
        self._tasks = tasks

    async def ask(self, decode: Instance, call: Call, saved: Saved, retries: Retries) -> Answer:
        """Ask a D; errors as those of `Upstream.post`, and once the client has the token also those of other D's."""
        token = saved.early_at(self._describe(decode), call.path)
        # D forces a token that it gets here however P has sampled it, because a client may have it.
        body = loading_body(call.body, saved.handoff, None if token is None else token.token)
        answer = await self._exchanges.post("decode", decode, call, body, awaits_first_byte=token is None)
        if token is None:
            return answer
        if not answer.is_complete:
            answer.first_bytes = self._tasks.spawn(self._exchanges.logged(answer.begin()))
            return StoreResumption(self._exchanges, self._metrics, call, retries).begin(token, answer)
        return answer


class StoreResumption(Resumption):
    """Continues a stream at other D's, which load from the store what P has put there for all.

    Args:
        exchanges: exchanges with instances.
        metrics: counters of attempts.
        call: the client's request.
        retries: the D's that may be asked.
    """

    def __init__(self, exchanges: Exchanges, metrics: Metrics, call: Call, retries: Retries) -> None:
        super().__init__(metrics, call, retries)
        self._exchanges = exchanges

    async def _ask(self, decode: Instance, token: EarlyToken) -> Answer:
        # A new id: the entry is the first D's, which may have consumed it.
        body = resumed_body(self._call.body, secrets.token_hex(16), [token.token])
        self._call.record.continue_attempt("", "", decode.url)
        answer = await self._exchanges.post("decode", decode, self._call, body)
        if answer.is_complete:
            raise failed(answer)
        return answer
