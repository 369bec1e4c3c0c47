"""The budget that all receivers share."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model import Reason, Refusal
from gateway.receive.limits import Budget


def test_as_many_requests_as_it_says_are_let_in() -> None:
    budget = Budget(100, 2)
    with budget.admit(), budget.admit(), pytest.raises(Refusal) as refused:
        budget.admit()
    assert (refused.value.reason, refused.value.retry_after_s) == (Reason.OVERLOADED, 1.0)
    with budget.admit(), budget.admit():
        pass


def test_bytes_count_over_all_requests_and_are_given_back() -> None:
    budget = Budget(100, 10)
    with budget.admit() as first:
        first.take(60)
        with budget.admit() as second:
            second.take(40)
            with pytest.raises(Refusal):
                second.take(1)
            assert budget.bytes_in_flight == 100
        first.take(40)
    assert budget.bytes_in_flight == 0


def test_one_request_alone_may_be_larger_than_the_budget() -> None:
    budget = Budget(100, 10)
    with budget.admit() as alone:
        alone.take(1000)
        with budget.admit() as other, pytest.raises(Refusal):
            other.take(1)
    assert budget.bytes_in_flight == 0


@given(st.lists(st.lists(st.integers(0, 60), max_size=5), max_size=20))
def test_whatever_is_taken_and_refused_nothing_stays_behind(requests: list[list[int]]) -> None:
    budget = Budget(100, 3)
    for sizes in requests:
        try:
            with budget.admit() as admission:
                for size in sizes:
                    admission.take(size)
        except Refusal:
            pass
    assert budget.bytes_in_flight == 0


def test_threads_do_not_lose_count() -> None:
    budget = Budget(1 << 40, 1000)

    def work() -> None:
        for _ in range(500):
            with budget.admit() as admission:
                admission.take(3)
                admission.take(4)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.bytes_in_flight == 0
