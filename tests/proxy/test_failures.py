import logging

from kvpipe.proxy.control import FailureLog


def test_each_instance_is_logged_once_a_minute_with_a_count(caplog):
    caplog.set_level(logging.WARNING)
    log = FailureLog()
    noted = [log.note("decode", "http://d", "gone", now_s) for now_s in (0, 1, 59, 60, 61)]
    assert noted == [True, False, False, True, False]
    assert log.note("prefill", "http://d", "gone", 61)
    assert "(2 similar suppressed)" in caplog.messages[1]
