"""The compose file of examples/rabbitmq_xpyd is made of arguments and settings that kvpipe has."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvpipe import cli
from kvpipe.proxy import Environment, Instance
from kvpipe.queue.broker import checked_url

FILE = Path(__file__).parents[2] / "examples" / "rabbitmq_xpyd" / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


def arguments(name):
    program, *words = SERVICES[name]["command"]
    assert program == "kvpipe"
    return cli._parse(words)


def test_the_front_end_knows_the_prefill_instances_and_dispatches_through_the_broker(tmp_path):
    found = Environment.read(SERVICES["front"]["environment"], tmp_path / ".env")
    assert found.prefill == (Instance("http://prefill-0:8000"), Instance("http://prefill-1:8000"))
    assert arguments("front").dispatch == "amqp"


@pytest.mark.parametrize("number", [0, 1])
def test_each_decode_instance_has_a_worker_on_the_queue_of_the_front_end(number):
    worker, front = arguments(f"worker-{number}"), arguments("front")
    assert Instance.parse(worker.decode) == Instance(f"http://decode-{number}:8000")
    assert (worker.queue, worker.delivery_limit) == (front.queue, front.delivery_limit)


@pytest.mark.parametrize("name", ["front", "worker-0", "worker-1"])
def test_the_broker_has_the_user_of_its_clients(name):
    broker, url = SERVICES["rabbitmq"]["environment"], SERVICES[name]["environment"]["KVPIPE_AMQP"]
    password = "${AMQP_PASSWORD:?a password}"
    assert broker == {"RABBITMQ_DEFAULT_USER": "kvpipe", "RABBITMQ_DEFAULT_PASS": password}
    assert password in url
    parsed = checked_url(url.replace(password, "secret"))
    assert (parsed.host, parsed.port, parsed.user, parsed.password) == ("rabbitmq", 5672, "kvpipe", "secret")
