"""Sends requests to instances. One that fails is logged, avoided for a while, and its description is read again."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from multidict import CIMultiDict

from kvpipe.proxy.bodies import plain_body
from kvpipe.proxy.control import FailureLog
from kvpipe.proxy.descriptions import Descriptions
from kvpipe.proxy.headers import headers_for_rank
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.pools import Pool
from kvpipe.proxy.ranks import Ranks
from kvpipe.proxy.request_record import RequestRecord
from kvpipe.proxy.upstream import Answer, InstanceError, Role, Upstream, WhenBegun, failed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request: parsed body, size of the body, headers for the instances, record with its API path."""

    body: dict[str, Any]
    num_bytes: int
    headers: CIMultiDict[str]
    record: RequestRecord

    @property
    def path(self) -> str:
        """The API path."""
        return self.record.path

    def num_queued_bytes(self) -> int:
        """Returns the bytes of body and headers, as a broker gets them: the body is written anew."""
        return len(plain_body(self.body)) + sum(len(name) + len(value) for name, value in self.headers.items())


class Exchanges:
    """Exchanges with instances; every server error is an `InstanceError`.

    Args:
        pools: the instances of each role.
        upstream: HTTP client of the instances.
        failures: log of failures.
        store_descriptions: descriptions of D's that share a store with P's, by their URLs.
        ranks: the ranks of servers, and the descriptions of their engines.
    """

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        upstream: Upstream,
        failures: FailureLog,
        store_descriptions: Descriptions,
        ranks: Ranks,
    ) -> None:
        self._pools = pools
        self._upstream = upstream
        self._failures = failures
        self._store_descriptions = store_descriptions
        self._ranks = ranks

    async def post(
        self,
        role: Role,
        instance: Instance,
        call: Call,
        body: bytes,
        *,
        may_leave: Callable[[], bool],
        awaits_first_byte: bool,
        names_rank: bool,
        when_begun: WhenBegun,
    ) -> Answer:
        """Post a body to the call's path; arguments as those of `Pool.post` and `Pool.unless_frozen`.

        Without `names_rank`, vLLM chooses the data-parallel rank of a server that has several.

        Raises:
            InstanceError: the instance was not reached, broke off, sent nothing for too long, is frozen, or answers
                with a server error.
        """
        pool = self._pools[role]
        headers = headers_for_rank(call.headers, instance.rank if names_rank else None)
        exchange = pool.post(
            instance, call.path, headers, body, awaits_first_byte=awaits_first_byte, when_begun=when_begun
        )
        return await self._checked(pool.unless_frozen(instance, exchange, may_leave), names_rank=names_rank)

    async def first_bytes(self, answer: Answer, may_leave: Callable[[], bool]) -> bytes:
        """The first bytes of a stream; errors as those of `Answer.begin`, or the instance is frozen."""
        pool = self._pools[answer.role]
        bounded = pool.unless_frozen(answer.instance, answer.begin(), may_leave)
        return await self._logged(bounded, names_rank=True)

    def is_frozen(self, role: Role, instance: Instance) -> bool:
        """As `Pool.is_frozen`."""
        return self._pools[role].is_frozen(instance)

    async def until_thawed(self, role: Role, instance: Instance) -> None:
        """Return when an instance is not frozen."""
        await self._pools[role].until_thawed(instance)

    async def get(self, role: Role, instance: Instance, path: str, headers: CIMultiDict[str]) -> Answer:
        """Send a GET; errors as those of `post`."""
        exchange = self._upstream.get(role, instance, path, headers)
        bounded = self._pools[role].unless_frozen(instance, exchange, lambda: True, is_generation=False)
        return await self._checked(bounded, names_rank=False)

    async def _logged(self, exchange: Awaitable[T], *, names_rank: bool) -> T:
        """Returns the result of an exchange; logs its failure."""
        try:
            return await exchange
        except InstanceError as error:
            is_server = error.is_of_server(names_rank=names_rank)
            name = error.instance.url if is_server else error.instance.name
            self._failures.note(error.role, name, error.reason, asyncio.get_running_loop().time())
            self._store_descriptions.refresh(error.instance.url)
            self._ranks.failed(error.instance)
            self._pools[error.role].failed(error.instance, is_server=is_server)
            raise

    async def _checked(self, exchange: Awaitable[Answer], *, names_rank: bool) -> Answer:
        return await self._logged(_without_server_error(exchange), names_rank=names_rank)


async def _without_server_error(exchange: Awaitable[Answer]) -> Answer:
    answer = await exchange
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise failed(answer)
    return answer
