"""A decode engine here, and prefill engines on another host that listen on a wildcard. Run by tests/test_hosts.py."""

import pytest

import tests.vllm.handoff.conftest  # noqa: F401 - sets vLLM up
from kvpipe.transfer_params import consume
from tests.e2e.groups import tiny_model
from tests.hosts.engine_there import LENGTH
from tests.hosts.namespaces import Host, why_no_hosts
from tests.hosts.translation import Translation
from tests.peers import Child
from tests.vllm.handoff.engine import NUM_BLOCKS, Engine, engine_config, new_id
from tests.vllm.handoff.test_scheduler import prompt, until
from tests.vllm.handoff.test_worker import caches, role

pytestmark = [pytest.mark.ucx, pytest.mark.vllm, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())]

LIMIT_S = 360


@pytest.fixture(scope="module", autouse=True)
def token():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("KVPIPE_TOKEN", "shared by both hosts")
        yield


@pytest.fixture(scope="module")
def host():
    with Host() as host:
        yield host


@pytest.fixture(scope="module")
def cable(host):
    return host.cable()


@pytest.fixture(scope="module")
def there(host, token):
    child = Child("main", "7200-7201", module="tests.hosts.engine_there", host=host, limit_s=LIMIT_S)
    yield child
    child.end()


def test_an_engine_that_listens_on_a_wildcard_is_reached_at_the_address_that_it_advertises(cable, there):
    hand_over(cable, there, cable.far)


def test_an_engine_is_reached_at_an_advertised_address_that_only_a_host_between_translates(host, there):
    try:
        translation = Translation(host)
    except OSError as error:
        pytest.skip(f"no translation: {error}")
    with translation:
        hand_over(translation, there, translation.address)


def hand_over(way, there, advertised):
    """Takes over what an engine computes that listens on a wildcard and advertises this address."""
    there.tell(f"0.0.0.0:7100 {advertised}")
    control = there.read()
    assert control == f"{advertised}:7100"
    assert there.read() == "0.0.0.0:7100 0.0.0.0:7200", "only these two listen"
    handoff, target = new_id(), caches()
    worker = role(listen=f"{way.near}:0")
    worker.register(target)
    engine = Engine(engine_config(tiny_model(), listen=f"{way.near}:0"))
    there.tell(handoff)
    request = engine.add(prompt(LENGTH), params=consume(handoff, control))

    def step():
        output = engine.scheduler.schedule()
        worker.begin_step(output.kv_connector_metadata)
        received, outcomes = worker.finished()[1], worker.drain_outcomes()
        engine.end(output, finished_recving=received or None, kv_connector_worker_meta=outcomes)
        return output.kv_connector_metadata

    [load] = until(lambda: step().loads)
    assert load.ranks[0][0] == f"{advertised}:7200"
    until(lambda: step() and request.is_finished())
    assert there.read() == f"acknowledged, {NUM_BLOCKS - 1} blocks are free"
    assert all(bool((layer[load.block_ids] == 7).all()) for layer in target.values())
    [ended] = [each for stats in engine.connector_stats for each in stats.get("handoffs", ())]
    assert (ended["result"], ended["received_tokens"]) == ("full", LENGTH)
    worker.close()
    engine.close()
