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


def test_take(stock):
    stock.take("bolt")
    assert stock.amount("bolt") == 2


def test_take_too_much(stock):
    with pytest.raises(OutOfStockError, match="bolt"):
        stock.take("bolt", 4)
    assert stock.amount("bolt") == 3
