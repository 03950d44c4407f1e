"""Asks every instance for its health."""

import asyncio
from http import HTTPStatus
from typing import Any

from multidict import CIMultiDict

from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.upstream import InstanceError, Role, Upstream


async def report_health(config: ProxyConfig, upstream: Upstream) -> tuple[bool, dict[str, Any]]:
    """Whether one P and one D at least are healthy, and what each instance said.

    Takes `connect_timeout_s` at most.
    """
    prefill, decode = await asyncio.gather(
        _probe_all(config, upstream, "prefill", config.prefill),
        _probe_all(config, upstream, "decode", config.decode),
    )
    is_up = "ok" in prefill.values() and "ok" in decode.values()
    status = "ok" if is_up else "unavailable"
    return is_up, {"status": status, "prefill": prefill, "decode": decode}


async def _probe_all(
    config: ProxyConfig, upstream: Upstream, role: Role, instances: tuple[Instance, ...]
) -> dict[str, str]:
    probes = (_probe(config.connect_timeout_s, upstream, role, i) for i in instances)
    said = await asyncio.gather(*probes)
    return {instance.url: text for instance, text in zip(instances, said, strict=True)}


async def _probe(timeout_s: float, upstream: Upstream, role: Role, instance: Instance) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await upstream.get(role, instance, "/health", CIMultiDict())
    except InstanceError as error:
        return error.reason
    except TimeoutError:
        return "no answer in time"
    return "ok" if answer.status == HTTPStatus.OK else f"answered {answer.status}"
