import pytest
from inventory import Inventory, OutOfStockError


@pytest.fixture
def stock():
    made = Inventory()
    made.add("bolt", 3)
    return made


def test_add_sums_up(stock):
    stock.add("bolt", 2)
    assert stock.amount("bolt") == 5


@pytest.mark.parametrize("amount", [0, -1])
def test_add_refuses_what_is_not_positive(stock, amount):
    with pytest.raises(ValueError):
        stock.add("nut", amount)


def test_take(stock):
    stock.take("bolt")
    assert stock.amount("bolt") == 2


def test_take_too_much(stock):
    with pytest.raises(OutOfStockError, match="bolt"):
        stock.take("bolt", 4)
    assert stock.amount("bolt") == 3


def test_what_is_used_up_is_gone(stock):
    stock.take("bolt", 3)
    assert "bolt" not in stock.names()
    assert stock.amount("bolt") == 0


def test_names_are_sorted(stock):
    stock.add("axle")
    stock.add("cog")
    assert stock.names() == ["axle", "bolt", "cog"]


def test_merge(stock):
    other = Inventory()
    other.add("bolt", 1)
    other.add("nut", 4)
    stock.merge(other)
    assert (stock.amount("bolt"), stock.amount("nut")) == (4, 4)
    assert other.amount("nut") == 4
