import asyncio
import inspect
import time

import pytest


class Net:
    """Pages with a delay; `fails` says how often an address fails first."""

    def __init__(self, delays=None, fails=None):
        self.delays, self.fails, self.asked = delays or {}, dict(fails or {}), []

    async def __call__(self, url):
        self.asked.append(url)
        await asyncio.sleep(self.delays.get(url, 0))
        if self.fails.get(url, 0):
            self.fails[url] -= 1
            raise ConnectionError(url)
        return f"page of {url}"


def fetcher(net, **options):
    from fetcher import Fetcher

    return Fetcher(net, **options)


def test_it_is_a_coroutine():
    made = fetcher(Net())
    for name in ("fetch", "fetch_all", "first"):
        assert inspect.iscoroutinefunction(getattr(made, name))


def test_one_page_and_the_cache():
    net = Net()
    made = fetcher(net)

    async def work():
        return [await made.fetch("a"), await made.fetch("a")]

    assert asyncio.run(work()) == ["page of a"] * 2
    assert net.asked == ["a"]


def test_failures_are_tried_again():
    net = Net(fails={"a": 2})
    assert asyncio.run(fetcher(net).fetch("a")) == "page of a"
    assert net.asked == ["a"] * 3


def test_after_the_retries_the_failure_comes_out():
    net = Net(fails={"a": 9})
    with pytest.raises(ConnectionError):
        asyncio.run(fetcher(net, retries=1).fetch("a"))
    assert net.asked == ["a"] * 2


def test_all_pages_in_order_and_at_a_time():
    net = Net({"a": 0.3, "b": 0.2, "c": 0.3})
    began = time.monotonic()
    pages = asyncio.run(fetcher(net).fetch_all(["a", "b", "c"]))
    assert pages == ["page of a", "page of b", "page of c"]
    assert time.monotonic() - began < 0.75


def test_none_of_none():
    assert asyncio.run(fetcher(Net()).fetch_all([])) == []


def test_one_failure_fails_all_at_once():
    net = Net({"slow": 3.0}, {"bad": 9})
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        asyncio.run(fetcher(net, retries=0).fetch_all(["slow", "bad"]))
    assert time.monotonic() - began < 2.0


def test_the_first_page():
    net = Net({"a": 3.0, "b": 0.05})
    began = time.monotonic()
    assert asyncio.run(fetcher(net).first(["a", "b"])) == "page of b"
    assert time.monotonic() - began < 2.0


def test_first_passes_over_failures_and_fails_when_all_do():
    net = Net({"b": 0.1}, {"a": 9})
    assert asyncio.run(fetcher(net, retries=0).first(["a", "b"])) == "page of b"
    with pytest.raises(ConnectionError):
        asyncio.run(fetcher(Net(fails={"a": 9, "b": 9}), retries=0).first(["a", "b"]))


def test_two_at_a_time_share_one_fetch():
    net = Net({"a": 0.1})
    made = fetcher(net)

    async def work():
        return await asyncio.gather(made.fetch("a"), made.fetch("a"))

    assert asyncio.run(work()) == ["page of a"] * 2
    assert net.asked == ["a"]
