"""Data-parallel ranks of one server: each is an instance of its own, which the proxy finds by itself."""

from collections import Counter
from itertools import product

import pytest
from aiohttp import web

from kvpipe.exceptions import ConnectError

from .harness import REQUEST, RecordingControl, answers, run, stage
from .test_app import get

HEADER = "x-data-parallel-rank"


class RankedControl(RecordingControl):
    """Control ports of engines with these ids, by address. A port without an id is silent."""

    def __init__(self, **num_ranks):
        super().__init__()
        self.ids = {}
        self.described = Counter()
        for name, number in num_ranks.items():
            self.set(name, number)

    def set(self, name, number):
        """Gives an instance so many ranks."""
        self.ids = {address: engine for address, engine in self.ids.items() if not address.startswith(f"{name}.")}
        for rank in range(number):
            self.ids[f"{name}.control:{7100 + rank}"] = f"{name}_dp{rank}" if number > 1 else name

    async def describe(self, address, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        self.described[address] += 1
        self._changed.set()
        if address not in self.ids:
            raise ConnectError(f"cannot reach {address}")
        engine = self.ids[address]
        rank = int(engine.rpartition("_dp")[2]) if "_dp" in engine else None
        return await super().describe(address) | {"engine_id": engine, "data_parallel_rank": rank}

    async def until_described(self, address, num):
        """Waits until a control port has been asked so many more times."""
        num += self.described[address]
        while self.described[address] < num:
            self._changed.clear()
            await self._changed.wait()


def ranked(number, behaviour=None):
    """A server with so many engines: its metrics have a sample for each."""
    lines = [f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 0.0' for rank in range(number)]
    page = "\n".join(["# TYPE vllm:num_requests_running gauge", *lines, ""])

    async def behave(request):
        if request.path == "/metrics":
            return web.Response(text=page)
        return await (behaviour or answers())(request)

    return behave


def ranks_of(instance):
    """The ranks that the requests for tokens have named."""
    asked = zip(instance.paths, instance.headers, strict=True)
    return [headers.get(HEADER) for path, headers in asked if path == "/v1/completions"]


@pytest.fixture
def _at_once(monkeypatch):
    """What is not known is asked again at once."""
    for name in ("ranks._RETRY_S", "ranks._REFRESH_S", "descriptions._MIN_INTERVAL_S", "descriptions._REFRESH_S"):
        monkeypatch.setattr(f"kvpipe.proxy.{name}", 0.01)


def test_every_pair_of_ranks_is_used_and_decode_gets_the_control_port_of_the_rank_that_has_the_request():
    async def scene():
        control = RankedControl(p0=2, d0=2)
        control.results = {f"d0.control:{port}": {"result": "full"} for port in (7100, 7101)}
        async with stage([ranked(2)], [ranked(2)], control=control) as s:
            for _ in range(8):
                await s.post()
            await control.until_asked(8)
        ports = [body["kv_transfer_params"]["remote_port"] for body in s.decode[0].bodies]
        of_prefill, of_decode = ranks_of(s.prefill[0]), ranks_of(s.decode[0])
        assert ports == [7100 + int(rank) for rank in of_prefill]
        pairs = Counter(zip(of_prefill, of_decode, strict=True))
        assert pairs == dict.fromkeys(product("01", "01"), 2)
        # The result is asked of the rank that has decoded.
        assert Counter(control.asked) == {"d0.control:7100": 4, "d0.control:7101": 4}

    run(scene)


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_that_the_client_names_reaches_no_instance(number):
    async def scene():
        async with stage([ranked(number)], [ranked(1)], control=RankedControl(p0=number, d0=1)) as s:
            for body, own in product((REQUEST, REQUEST | {"n": 2}), ("7", "nonsense")):
                assert (await s.post(body=body, headers={HEADER: own}))[0] == 200
        assert set(ranks_of(s.prefill[0])) == ({"0", "1"} if number == 2 else {None})
        assert set(ranks_of(s.decode[0])) == {None}

    run(scene)


def test_the_rank_of_a_request_that_one_instance_answers_alone_is_left_to_vllm():
    async def scene():
        async with stage([ranked(2)], [ranked(2)], control=RankedControl(p0=2, d0=2)) as s:
            for body in (REQUEST | {"n": 2}, REQUEST | {"prompt": ["a", "b"]}, REQUEST | {"max_tokens": 1}):
                assert (await s.post(body=body))[0] == 200
        assert (ranks_of(s.decode[0]), ranks_of(s.prefill[0])) == ([None, None], [None])

    run(scene)


def test_a_rank_whose_control_port_is_that_of_another_engine_gets_no_requests_and_the_log_has_the_remedy(caplog):
    async def scene():
        control = RankedControl(p0=2)
        control.ids["p0.control:7101"] = "other_dp1"
        async with stage([ranked(2)], control=control) as s:
            for _ in range(4):
                await s.post()
        assert ranks_of(s.prefill[0]) == ["0"] * 4
        [line] = [record.message for record in caplog.records if "role=rank" in record.message]
        assert f"url={s.prefill[0].url}#dp1 " in line
        assert "p0.control:7101 is the control port of engine other_dp1, not of p0_dp1; have each rank listen" in line

    run(scene)


def test_without_the_number_of_ranks_the_first_one_gets_all_requests_and_the_log_has_the_remedy(caplog):
    async def scene():
        async with stage([ranked(0)], control=RankedControl(p0=2)) as s:
            for _ in range(4):
                await s.post()
        assert ranks_of(s.prefill[0]) == ["0"] * 4
        assert "its metrics have no engine to count; start it without --disable-log-stats" in caplog.text

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_ranks_are_found_when_a_server_starts_late_kept_while_a_port_is_silent_and_forgotten_when_they_are_gone():
    async def scene():
        control = RankedControl()
        number = 2

        async def server(request):
            return await ranked(number)(request)

        async with stage([server], control=control) as s:

            async def until_ranks(wanted):
                found = set()
                while found != wanted:
                    s.prefill[0].paths.clear()
                    s.prefill[0].headers.clear()
                    for _ in range(4):
                        await s.post()
                    found = set(ranks_of(s.prefill[0]))

            await until_ranks({None})
            control.set("p0", 2)
            await until_ranks({"0", "1"})
            del control.ids["p0.control:7101"]
            await control.until_described("p0.control:7100", 5)
            await until_ranks({"0", "1"})
            number = 1
            control.set("p0", 1)
            await until_ranks({None})
            silent = control.described["p0.control:7101"]
            await control.until_described("p0.control:7100", 5)
            assert control.described["p0.control:7101"] <= silent + 1  # one question may have been on its way

    run(scene)


def test_a_failing_rank_hits_its_own_requests_only():
    async def fails_at_1(request):
        return await answers(500 if request.headers.get(HEADER) == "1" else 200)(request)

    async def scene():
        async with stage([ranked(2, fails_at_1)], control=RankedControl(p0=2)) as s:
            statuses = [(await s.post())[0] for _ in range(6)]
            assert statuses == [200] * 6
            # The second request went to the other rank; the following ones avoid the one that has failed.
            assert ranks_of(s.prefill[0]) == ["0", "1", "0", "0", "0", "0", "0"]

    run(scene)


def test_a_server_that_has_died_with_all_its_ranks_is_one_engine_that_the_request_has_broken():
    async def dies(request):
        return await answers(500)(request)

    async def scene():
        async with stage([ranked(2, dies)], control=RankedControl(p0=2)) as s:
            assert (await s.post())[0] == 200  # decode has computed the prompt
            assert ranks_of(s.prefill[0]) == ["0", "1"]

    run(scene)


def test_health_names_each_rank_and_each_pair_of_ranks():
    async def scene():
        control = RankedControl(p0=2, d0=2)
        control.reasons = {("d0.control:7101", "p0.control:7100"): "no way"}
        async with stage([ranked(2)], [ranked(2)], control=control) as s:
            await control.until_checked(4)
            p, d = s.prefill[0].url, s.decode[0].url
            status, report = await get(s, "/health")
            assert (status, report["status"]) == (200, "ok")
            assert report["prefill"] == {f"{p}#dp0": "ok", f"{p}#dp1": "ok"}
            assert report["decode"] == {f"{d}#dp0": "ok", f"{d}#dp1": "ok"}
            assert report["pairs"] == {f"{d}#dp1": {f"{p}#dp0": "no way"}}

    run(scene)
