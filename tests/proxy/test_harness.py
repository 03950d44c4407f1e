"""Stand-ins have to follow the real classes."""

import inspect

from kvpipe.control import ControlClient

from .harness import RecordingControl


def _questions(kind):
    """The public methods and their parameters, by name."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters) for name, method in methods if not name.startswith("_")}


def test_the_fake_of_the_control_client_can_be_asked_whatever_the_real_one_can():
    real, fake = _questions(ControlClient), _questions(RecordingControl)
    del real["close"]
    assert {name: fake.get(name) for name in real} == real
