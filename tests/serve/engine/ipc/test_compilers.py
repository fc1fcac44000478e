"""Tenants take turns with the threads that compile grammars."""

from __future__ import annotations

import threading

from decoding.engine_requests import make_request
from mars_serve.engine.ipc.compilers import MOST_OF_TENANT, Compilers
from mars_serve.engine.request import Request


class Work:
    """Grammars that compile until the test lets them; "fast" ones are done at once."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[str] = []
        self.ended = threading.Condition()
        self.num_ended = 0

    def __call__(self, request: Request) -> None:
        self.begun.append(request.id)
        if not request.id.startswith("fast"):
            assert self.may_end.wait(10)
        with self.ended:
            self.num_ended += 1
            self.ended.notify_all()

    def wait_for(self, number: int) -> None:
        with self.ended:
            assert self.ended.wait_for(lambda: self.num_ended == number, timeout=60)


def test_one_tenants_grammars_do_not_keep_anothers_waiting() -> None:
    work = Work()
    compilers = Compilers(work)
    for number in range(20):
        compilers.submit(make_request(f"slow {number}", tenant="attacker"))
    compilers.submit(make_request("fast 1", tenant="other"))
    work.wait_for(1)
    assert len(work.begun) == MOST_OF_TENANT + 1, "few of the attacker's have begun"
    for number in range(3):
        compilers.submit(make_request(f"fast {number + 2}", tenant=f"tenant {number % 2}"))
    work.wait_for(4)
    work.may_end.set()
    work.wait_for(24)
    assert sorted(work.begun)[4:] == sorted(f"slow {number}" for number in range(20))
    compilers.close()


def test_tenants_take_turns_when_all_threads_are_busy() -> None:
    work = Work()
    compilers = Compilers(work)
    for tenant in ("one", "two"):
        for number in range(6):
            compilers.submit(make_request(f"{tenant} {number}", tenant=tenant))
    work.may_end.set()
    for number in range(3):
        compilers.submit(make_request(f"fast {number}", tenant="three"))
    work.wait_for(15)
    position = {name: index for index, name in enumerate(work.begun)}
    assert position["fast 0"] < position["one 5"]
    assert position["fast 0"] < position["two 5"]
    for tenant in ("one", "two"):
        own = [position[f"{tenant} {number}"] for number in range(6)]
        assert own == sorted(own), "each tenant's are in order of arrival"
    compilers.close()


def test_nothing_begins_after_closing() -> None:
    work = Work()
    compilers = Compilers(work)
    for number in range(5):
        compilers.submit(make_request(f"slow {number}", tenant="one"))
    while len(work.begun) < MOST_OF_TENANT:
        pass
    compilers.close()
    work.may_end.set()
    work.wait_for(MOST_OF_TENANT)
    assert len(work.begun) == MOST_OF_TENANT
