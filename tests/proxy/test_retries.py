from kvpipe.proxy.retries import RetryBudget


def test_a_quiet_proxy_has_ten_retries_and_every_fifth_request_adds_one():
    budget = RetryBudget()
    assert [budget.consume() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(5):
        assert not budget.consume()
        budget.add_request()
    budget.add_request()
    assert [budget.consume(), budget.consume()] == [True, False]


def test_requests_save_no_more_than_ten_retries():
    budget = RetryBudget()
    for _ in range(1000):
        budget.add_request()
    assert [budget.consume() for _ in range(11)].count(True) == 10
