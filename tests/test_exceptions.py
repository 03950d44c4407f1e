"""The tree of errors."""

import inspect
import pickle

import pytest

import kvpipe
from kvpipe import exceptions

CLASSES = [kind for _, kind in inspect.getmembers(exceptions, inspect.isclass)]
SECOND_BASES = {
    "AuthenticationError": PermissionError,
    "ConfigError": ValueError,
    "ConnectError": ConnectionError,
    "EndOfPipeError": EOFError,
    "PeerLostError": ConnectionError,
    "TransferTimeoutError": TimeoutError,
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_is_exported_and_documented_and_shows_its_message(kind):
    assert getattr(kvpipe, kind.__name__) is kind
    assert kind.__name__ in kvpipe.__all__
    assert inspect.getdoc(kind)
    assert kind.__name__ in exceptions.__doc__
    assert str(kind("what happened")) == "what happened"
    assert issubclass(kind, kvpipe.KVPipeError)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_is_also_the_builtin_that_callers_know(kind):
    builtin = SECOND_BASES.get(kind.__name__)
    others = {base for base in kind.__mro__ if base.__module__ == "builtins"} - {object, BaseException, Exception}
    assert (builtin in others) if builtin else not others


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_can_be_pickled(kind):
    copy = pickle.loads(pickle.dumps(kind("what happened")))
    assert (type(copy), str(copy)) == (kind, "what happened")
