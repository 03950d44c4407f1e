"""Data-parallel ranks of one server: each is an instance of its own, which the proxy finds by itself."""

import asyncio
from collections import Counter
from itertools import count, product

import pytest
from aiohttp import web

from kvpipe.exceptions import ConnectError

from .harness import LIMIT_S, REQUEST, RecordingControl, StandIn, answers, never_ends, run, stage
from .test_app import get

HEADER = "x-data-parallel-rank"


class RankedControl(RecordingControl):
    """Control ports of engines with these ids, by address. A port without an id is silent; one with `stuck` hangs."""

    def __init__(self, **num_ranks):
        super().__init__()
        self.ids = {}
        self.described = Counter()
        self._lives = count()
        for name, number in num_ranks.items():
            self.set(name, number)

    def set(self, name, number):
        """Gives an instance so many ranks."""
        self.ids = {address: engine for address, engine in self.ids.items() if not address.startswith(f"{name}.")}
        engine = f"{name}-{next(self._lives)}"
        for rank in range(number):
            self.ids[f"{name}.control:{7100 + rank}"] = f"{engine}_dp{rank}" if number > 1 else engine

    async def describe(self, address, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        self.described[address] += 1
        self._changed.set()
        if address not in self.ids:
            raise ConnectError(f"cannot reach {address}")
        engine = self.ids[address]
        if engine == "stuck":
            await asyncio.Event().wait()
        rank = int(engine.rpartition("_dp")[2]) if "_dp" in engine else None
        return await super().describe(address) | {"engine_id": engine, "data_parallel_rank": rank}

    async def until_described(self, address, num):
        """Waits until a control port has been asked so many more times."""
        num += self.described[address]
        while self.described[address] < num:
            self._changed.clear()
            await self._changed.wait()


def ranked(number, behaviour=None, first=0):
    """A server with so many engines: its metrics have a sample for each."""
    engines = range(first, first + number)
    lines = [f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} 0.0' for engine in engines]
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


async def until_ranks(s, wanted):
    """Sends requests until P's ranks in their headers are these."""
    found = None
    while found != wanted:
        s.prefill[0].paths.clear()
        s.prefill[0].headers.clear()
        for _ in range(4):
            await s.post()
        found = set(ranks_of(s.prefill[0]))


def rank_lines(caplog):
    return [record.message for record in caplog.records if "role=rank" in record.message]


class Changing:
    """A server of which the test exchanges what it does."""

    def __init__(self, behaviour):
        self.now = behaviour

    async def __call__(self, request):
        return await self.now(request)


def fails_metrics(status):
    async def behave(request):
        return await answers(status if request.path == "/metrics" else 200)(request)

    return behave


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
        [line] = rank_lines(caplog)
        assert f"url={s.prefill[0].url}#dp1 " in line
        assert "p0.control:7101 is the control port of engine other_dp1, not of p0-0_dp1; have each rank listen" in line

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
        control, server = RankedControl(), Changing(ranked(2))
        async with stage([server], control=control) as s:
            await until_ranks(s, {None})
            control.set("p0", 2)
            await until_ranks(s, {"0", "1"})
            del control.ids["p0.control:7101"]
            await control.until_described("p0.control:7100", 5)
            await until_ranks(s, {"0", "1"})
            server.now = ranked(1)
            control.set("p0", 1)
            await until_ranks(s, {None})
            silent = control.described["p0.control:7101"]
            await control.until_described("p0.control:7100", 5)
            assert control.described["p0.control:7101"] <= silent + 1  # one question may have been on its way

    run(scene)


def test_handoffs_name_the_first_rank_while_the_metrics_of_a_server_do_not_come(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.ranks._START_S", 0.01)

    async def hangs(request):
        return await (never_ends if request.path == "/metrics" else answers())(request)

    async def scene():
        async with stage([hangs], control=RankedControl(p0=2), control_timeout_s=LIMIT_S) as s:
            await s.post()
            assert ranks_of(s.prefill[0]) == ["0"]

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_a_server_that_comes_back_with_several_ranks_gets_handoffs_for_the_first_one_before_their_number_is_known():
    async def scene():
        control, server = RankedControl(p0=1), Changing(ranked(1))
        async with stage([server], control=control, control_timeout_s=LIMIT_S) as s:
            await until_ranks(s, {None})

            async def hangs(request):
                return await (never_ends if request.path == "/metrics" else answers())(request)

            server.now = hangs
            control.set("p0", 2)
            await until_ranks(s, {"0"})

    run(scene)


def test_a_rank_is_used_while_the_control_port_of_another_one_hangs(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.ranks._START_S", 0.01)

    async def scene():
        control = RankedControl(p0=3)
        control.ids["p0.control:7102"] = "stuck"
        async with stage([ranked(3)], control=control, control_timeout_s=LIMIT_S) as s:
            await until_ranks(s, {"0", "1"})

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_after_a_restart_with_fewer_ranks_none_that_is_gone_is_named_even_if_the_metrics_cannot_be_read():
    async def scene():
        control, server = RankedControl(p0=4), Changing(ranked(4))
        async with stage([server], control=control) as s:
            await until_ranks(s, set("0123"))
            server.now = fails_metrics(500)
            control.set("p0", 2)
            await until_ranks(s, {"0"})
            server.now = ranked(2)
            await until_ranks(s, {"0", "1"})

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_a_silent_rank_gets_no_requests_while_the_number_of_ranks_cannot_be_read():
    async def scene():
        control, server = RankedControl(p0=3), Changing(ranked(3))
        async with stage([server], control=control) as s:
            await until_ranks(s, set("012"))
            server.now = fails_metrics(500)
            del control.ids["p0.control:7102"]
            await until_ranks(s, {"0", "1"})

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_ranks_are_kept_when_the_named_control_port_misses_a_question_even_if_the_metrics_cannot_be_read():
    async def scene():
        control, server = RankedControl(p0=2), Changing(ranked(2))
        async with stage([server], control=control) as s:
            await until_ranks(s, {"0", "1"})
            server.now = fails_metrics(500)
            engine = control.ids.pop("p0.control:7100")
            await control.until_described("p0.control:7100", 3)
            control.ids["p0.control:7100"] = engine
            await control.until_described("p0.control:7100", 3)
            s.prefill[0].headers.clear()
            s.prefill[0].paths.clear()
            for _ in range(4):
                await s.post()
            assert sorted(ranks_of(s.prefill[0])) == ["0", "0", "1", "1"]

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_after_a_restart_requests_name_the_rank_of_the_named_control_port_even_if_it_is_not_the_first():
    async def scene():
        control, server = RankedControl(), Changing(ranked(2))
        control.ids = {"p0.control:7099": "p0-0_dp0", "p0.control:7100": "p0-0_dp1"}
        async with stage([server], control=control) as s:
            await until_ranks(s, {"0", "1"})
            server.now = fails_metrics(500)
            control.ids = {"p0.control:7099": "p0-1_dp0", "p0.control:7100": "p0-1_dp1"}
            await until_ranks(s, {"1"})
            assert {body["kv_transfer_params"]["remote_port"] for body in s.decode[0].bodies[-4:]} == {7100}

    run(scene)


def test_a_failure_has_the_ranks_of_its_server_looked_at_again(monkeypatch):
    for name, seconds in (("_RETRY_S", 0.01), ("_REFRESH_S", 1000.0)):
        monkeypatch.setattr(f"kvpipe.proxy.ranks.{name}", seconds)
    for name, seconds in (("_MIN_INTERVAL_S", 0.01), ("_REFRESH_S", 1000.0)):
        monkeypatch.setattr(f"kvpipe.proxy.descriptions.{name}", seconds)

    async def scene():
        control, server = RankedControl(p0=2), Changing(ranked(2))
        async with stage([server], control=control) as s:
            await until_ranks(s, {"0", "1"})
            control.set("p0", 3)
            server.now = answers(503)
            await s.post()
            server.now = ranked(3)
            await until_ranks(s, {"0", "1", "2"})

    run(scene)


def test_a_server_that_is_gone_is_one_failure_and_not_one_for_each_rank(caplog):
    async def scene():
        gone = StandIn("p0", ranked(4))
        runner = await gone.serve()
        async with stage([gone, ranked(1)], control=RankedControl(p0=4, p1=1)) as s:
            for _ in range(5):
                await s.post()
            assert set(ranks_of(gone)) == set("0123")
            await runner.cleanup()
            for _ in range(10):
                assert (await s.post())[0] == 200
        failed = [record.message for record in caplog.records if "failed role=prefill" in record.message]
        assert len(failed) == 1

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_ranks_on_another_host_are_named_in_the_log_with_the_remedy(caplog):
    async def scene():
        control = RankedControl(p0=3)
        del control.ids["p0.control:7102"]
        async with stage([ranked(3)], control=control) as s:
            await until_ranks(s, {"0", "1"})
            while not rank_lines(caplog):
                await control.until_described("p0.control:7102", 1)
            [line] = rank_lines(caplog)
            assert f"url={s.prefill[0].url}#dp2 " in line
            assert "no requests: its control port p0.control:7102: cannot reach" in line
            assert "URL of its own, by vLLM's --data-parallel-hybrid-lb" in line

    run(scene)


def test_metrics_are_not_read_over_and_over_for_a_rank_whose_control_port_is_silent(monkeypatch):
    monkeypatch.setattr("kvpipe.proxy.ranks._RETRY_S", 0.001)
    monkeypatch.setattr("kvpipe.proxy.descriptions._MIN_INTERVAL_S", 0.01)

    async def scene():
        control = RankedControl(p0=3)
        del control.ids["p0.control:7102"]
        async with stage([ranked(3)], control=control) as s:
            await control.until_described("p0.control:7102", 20)
            assert s.prefill[0].paths.count("/metrics") == 1

    run(scene)


@pytest.mark.parametrize("page", [ranked(0), ranked(2, first=4)])
def test_metrics_that_do_not_list_the_named_rank_are_not_read_over_and_over(monkeypatch, page):
    monkeypatch.setattr("kvpipe.proxy.ranks._RETRY_S", 0.001)
    for name in ("_MIN_INTERVAL_S", "_REFRESH_S"):
        monkeypatch.setattr(f"kvpipe.proxy.descriptions.{name}", 0.01)

    async def scene():
        control = RankedControl(p0=2)
        async with stage([page], control=control) as s:
            await control.until_described("p0.control:7100", 20)
            assert s.prefill[0].paths.count("/metrics") == 1

    run(scene)


def test_metrics_that_are_refused_are_logged_as_such(caplog):
    async def scene():
        async with stage([fails_metrics(401)], control=RankedControl(p0=2)) as s:
            await s.post()
        [line] = rank_lines(caplog)
        assert "number of its data-parallel ranks" in line
        assert "answered 401" in line
        assert "--disable-log-stats" not in line

    run(scene)


@pytest.mark.parametrize(("first", "named"), [(0, 1), (4, 0), (4, 1)])
def test_a_rank_is_counted_from_the_first_one_behind_the_url_whichever_control_port_the_user_names(first, named):
    async def scene():
        control = RankedControl()
        for index in range(2):
            control.ids[f"p0.control:{7100 + index - named}"] = f"p0_dp{first + index}"
        async with stage([ranked(2, first=first)], control=control) as s:
            for _ in range(4):
                await s.post()
        ports = [body["kv_transfer_params"]["remote_port"] for body in s.decode[0].bodies]
        assert Counter(zip(ranks_of(s.prefill[0]), ports, strict=True)) == {
            ("0", 7100 - named): 2,
            ("1", 7101 - named): 2,
        }

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_a_control_port_that_is_none_of_its_urls_is_named_in_the_log(caplog):
    async def scene():
        async with stage([ranked(2, first=4)], control=RankedControl(p0=2)) as s:
            await until_ranks(s, {"0"})
            while not rank_lines(caplog):
                await s.post()
        assert "its engines are [4, 5], and p0.control:7100 is the control port of engine 0" in rank_lines(caplog)[0]

    run(scene)


def test_a_failure_is_logged_under_the_rank_only_if_the_request_has_named_one(caplog):
    async def scene():
        async with stage([ranked(2, answers(503))], [ranked(2, answers(503))], control=RankedControl(p0=2, d0=2)) as s:
            await s.post()
            await s.post(body=REQUEST | {"n": 2})
            lines = [record.message for record in caplog.records if "instance.failed role=" in record.message]
            failed = {line.split()[2].removeprefix("url=") for line in lines}
            p, d = s.prefill[0].url, s.decode[0].url
            assert failed == {f"{p}#dp0", f"{p}#dp1", d}

    run(scene)


def test_a_server_that_answers_alone_and_fails_is_not_asked_again_by_way_of_another_rank():
    async def fails(request):
        return await answers(503)(request)

    async def scene():
        async with stage([ranked(1)], [ranked(2, fails)], control=RankedControl(p0=1, d0=2)) as s:
            assert (await s.post(body=REQUEST | {"n": 2}))[0] == 503
            await get(s, "/v1/models")
            paths = s.decode[0].paths
            assert (paths.count("/v1/completions"), paths.count("/v1/models")) == (1, 1)

    run(scene)


@pytest.mark.usefixtures("_at_once")
def test_the_search_for_ranks_survives_a_nonsense_description_and_nonsense_metrics():
    async def nonsense(request):
        return web.Response(text=f'vllm:num_requests_running{{engine="{"9" * 5000}"}} 0.0\n')

    class Nonsense(RankedControl):
        rank = "0"

        async def describe(self, *arguments):
            return await super().describe(*arguments) | ({"data_parallel_rank": self.rank} if self.rank else {})

    async def scene():
        control, server = Nonsense(p0=2), Changing(ranked(2))
        async with stage([server], control=control) as s:
            await until_ranks(s, {None})
            server.now = nonsense
            control.rank = None
            control.set("p0", 2)
            await until_ranks(s, {"0"})
            server.now = ranked(2)
            await until_ranks(s, {"0", "1"})

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


def test_health_names_each_rank_and_each_pair_of_servers_is_checked_once():
    async def scene():
        control = RankedControl(p0=2, p1=2, d0=2)
        control.reasons = {("d0.control:7100", "p0.control:7100"): "no way"}
        async with stage([ranked(2), ranked(2)], [ranked(2)], control=control) as s:
            await control.until_checked(2)
            p, d = s.prefill[0].url, s.decode[0].url
            status, report = await get(s, "/health")
            assert (status, report["status"]) == (200, "ok")
            other = s.prefill[1].url
            states = dict.fromkeys([f"{p}#dp0", f"{p}#dp1"], "no partner: no way")
            assert report["prefill"] == states | {f"{other}#dp0": "ok", f"{other}#dp1": "ok"}
            assert report["decode"] == {f"{d}#dp0": "ok", f"{d}#dp1": "ok"}
            assert report["pairs"] == {d: {p: "no way"}}
            assert len(control.checks) == 2

    run(scene)
