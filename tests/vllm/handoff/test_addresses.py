"""Addresses at which an engine listens, and those that other instances get."""

import copy
import socket
from typing import Any

import pytest
from vllm.config import VllmConfig

from kvpipe._machine import machine
from kvpipe.control import ControlClient
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import produce
from kvpipe.vllm.handoff.addresses import Addresses
from kvpipe.vllm.handoff.config import ConnectorConfig
from tests.vllm.handoff.engine import Engine, engine_config, new_id
from tests.vllm.handoff.test_scheduler import prompt, until
from tests.vllm.handoff.test_worker import caches, role

pytestmark = pytest.mark.vllm

TOKEN = "the token of this test"


def addresses(listen: str, advertise: str = "", agent_ports: str = "") -> Addresses:
    return Addresses.parse(listen=listen, advertise=advertise, agent_ports=agent_ports)


@pytest.mark.parametrize(
    ("listen", "advertise", "bound", "told"),
    [
        ("10.0.0.1:7100", "", "10.0.0.1:7100", "10.0.0.1:7100"),
        ("0.0.0.0:7100", "10.0.0.1", "0.0.0.0:7100", "10.0.0.1:7100"),
        ("0.0.0.0:7100", "node-3:30100", "0.0.0.0:7100", "node-3:30100"),
        ("10.0.0.1:0", "node-3", "10.0.0.1:4711", "node-3:4711"),
        ("[::]:7100", "fd00::5", "[::]:7100", "[fd00::5]:7100"),
        ("[::]:7100", "[fd00::5]:30100", "[::]:7100", "[fd00::5]:30100"),
    ],
)
def test_others_are_told_what_is_advertised_and_else_what_is_bound(
    listen: str, advertise: str, bound: str, told: str
) -> None:
    parsed = addresses(listen, advertise)
    assert parsed.control(0) == listen
    assert parsed.advertised_control(bound, 0) == told


def test_an_agent_is_told_by_the_advertised_host_and_its_own_port() -> None:
    parsed = addresses("0.0.0.0:7100", "node-3:30100", "7200-7231")
    assert parsed.agent == "0.0.0.0:7200-7231"
    assert parsed.advertised("0.0.0.0:7203") == "node-3:7203"
    assert addresses("10.0.0.1:7100").agent == "10.0.0.1:0"


def test_own_workers_reach_a_wildcard_over_loopback() -> None:
    assert addresses("0.0.0.0:1", "a").local("0.0.0.0:7100") == "127.0.0.1:7100"
    assert addresses("[::]:1", "a").local("[::]:7100") == "[::1]:7100"
    assert addresses("10.0.0.1:1", "a").local("10.0.0.1:7100") == "10.0.0.1:7100"


def test_data_parallel_ranks_take_the_port_plus_their_rank() -> None:
    parsed = addresses("0.0.0.0:7100", "node-3:30100")
    assert [parsed.control(rank) for rank in (0, 1, 2)] == ["0.0.0.0:7100", "0.0.0.0:7101", "0.0.0.0:7102"]
    assert parsed.advertised_control("0.0.0.0:7102", 2) == "node-3:30102"
    assert addresses("10.0.0.1:0").control(2) == "10.0.0.1:0"
    for key, parsed in [("listen", addresses("10.0.0.1:65535")), ("advertise", addresses("10.0.0.1:0", "a:65535"))]:
        with pytest.raises(ConfigError, match=f"{key}: port 65535 plus data-parallel rank 1"):
            parsed.advertised_control(parsed.control(1), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "0.0.0.0:7100"}, r'a wildcard cannot be advertised; add .* "advertise": "10\.0\.0\.1"'),
        ({"listen": "[::]:7100"}, "a wildcard cannot be advertised"),
        ({"listen": "[0:0::]:7100"}, "a wildcard cannot be advertised"),
        ({"listen": "10.0.0.1"}, "expected HOST:PORT"),
        ({"listen": "fd00::1:7100"}, "expected HOST:PORT"),
        ({"listen": "10.0.0.1:70000"}, "expected HOST:PORT"),
        ({"listen": ":7100"}, "expected HOST:PORT"),
        ({"advertise": "0.0.0.0"}, "others cannot connect to a wildcard"),
        ({"advertise": "[::]:7100"}, "others cannot connect to a wildcard"),
        ({"advertise": "a:b"}, "advertise='a:b': expected HOST:PORT"),
        ({"agent_ports": "7200-"}, "agent_ports='7200-': expected FIRST-LAST"),
        ({"agent_ports": "7231-7200"}, "expected FIRST-LAST"),
        ({"agent_ports": "0-7"}, "expected FIRST-LAST"),
        ({"agent_ports": "7200-65536"}, "expected FIRST-LAST"),
    ],
)
def test_a_bad_address_is_named_with_its_value_and_what_to_write(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConnectorConfig.parse(settings)


def free_ports(count: int) -> int:
    """The first of some free ports in a row."""
    for first in range(20_000, 30_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for port, one in enumerate(sockets, first):
                one.bind(("127.0.0.1", port))
        except OSError:
            continue
        else:
            return first
        finally:
            for one in sockets:
                one.close()
    pytest.fail("no free ports")


def test_two_data_parallel_ranks_of_one_configuration_listen_beside_each_other_and_say_which_they_are(
    config: VllmConfig,
) -> None:
    first, engines = free_ports(2), []
    for rank in (0, 1):
        of_rank = copy.deepcopy(config)
        of_rank.kv_transfer_config.kv_connector_extra_config = {"listen": f"127.0.0.1:{first}"}
        # As vLLM sets them in EngineCore.
        of_rank.parallel_config.data_parallel_index = rank
        of_rank.kv_transfer_config.engine_id = f"engine_dp{rank}"
        engines.append(Engine(of_rank))
    assert [engine.role.address for engine in engines] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    client = ControlClient("")
    descriptions = [client.describe(engine.role.address).wait(5) for engine in engines]
    assert [description["data_parallel_rank"] for description in descriptions] == [0, 1]
    for each in (client, *engines):
        each.close()


def test_workers_take_the_free_ports_of_the_range_in_its_order_and_the_last_one_gets_an_error() -> None:
    first = free_ports(2)
    ports = f"{first}-{first + 1}"
    workers = [role(agent_ports=ports) for _ in range(3)]
    for worker in workers[:2]:
        worker.register(caches())
    told = [worker.handshake().address for worker in workers[:2]]
    assert told == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{ports}.* all ports of the range"):
        workers[2].register(caches())
    for worker in workers:
        worker.close()


def test_routers_and_consumers_are_told_the_advertised_addresses(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPIPE_TOKEN", TOKEN)
    settings = {"listen": "0.0.0.0:0", "advertise": "localhost"}
    engine, worker = Engine(engine_config(tiny_model, **settings)), role(**settings)
    worker.register(caches())
    handshake = worker.handshake()
    assert handshake.address.startswith("localhost:")
    engine.role.set_workers({(0, 0): handshake})
    request = engine.add(prompt(100), max_tokens=1, params=produce(new_id()))
    answers = []
    finished = engine.role.finished
    monkeypatch.setattr(engine.role, "finished", lambda *args: answers.append(finished(*args)) or answers[-1])
    until(lambda: engine.step() and request.is_finished())
    [(_, params)] = answers
    control = f"{params['remote_host']}:{params['remote_port']}"
    assert control == engine.role.address
    assert control.startswith("localhost:")
    client = ControlClient(TOKEN)
    description = client.describe(control).wait(5)
    assert (description["address"], description["ranks"]) == (control, [handshake.address])
    assert description["machines"] == [machine()]
    client.close()
    worker.close()
    engine.close()


def test_an_address_that_another_machine_translates_can_be_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPIPE_TOKEN", TOKEN)
    worker = role(listen="0.0.0.0:0", advertise="203.0.113.1")
    worker.register(caches())
    assert worker.handshake().address.startswith("203.0.113.1:")
    worker.close()
