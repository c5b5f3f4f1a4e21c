import ast
from pathlib import Path

import pytest


@pytest.fixture
def ledger():
    from ledger import Ledger

    ticks = iter(range(100))
    made = Ledger(clock=lambda: next(ticks))
    for name in ("bank", "ann", "bo"):
        made.open_account(name)
    return made


def test_the_module_has_no_state(ledger):
    tree = ast.parse(Path("ledger.py").read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Global)]
    made = [n for n in tree.body if isinstance(n, (ast.Assign, ast.AnnAssign))]
    assert not [n for n in made if isinstance(n.value, (ast.List, ast.Dict, ast.Set, ast.Call))]


def test_two_ledgers_know_nothing_of_each_other(ledger):
    from ledger import Ledger

    other = Ledger()
    assert other.balances == {}
    other.open_account("ann")
    ledger.book("bank", "ann", 5)
    assert other.balances == {"ann": 0}


def test_booking(ledger):
    assert ledger.book("bank", "ann", 100) == 0
    assert ledger.book("ann", "bo", 30) == 1
    assert ledger.balances == {"bank": -100, "ann": 70, "bo": 30}


def test_the_clock_is_given(ledger):
    ledger.book("bank", "ann", 100)
    ledger.book("ann", "bo", 30)
    assert ledger.journal == ((0, "bank", "ann", 100), (1, "ann", "bo", 30))


def test_what_is_given_out_changes_nothing(ledger):
    ledger.balances["ann"] = 10**6
    assert ledger.balances["ann"] == 0
    with pytest.raises(AttributeError):
        ledger.journal.append(1)


@pytest.mark.parametrize(("words", "error"), [
    (("bank", "ann", 0), ValueError), (("ann", "bo", 1), ValueError), (("bank", "ann", 10_001), ValueError),
    (("bank", "carl", 1), KeyError), (("carl", "bank", 1), KeyError),
])
def test_what_is_refused_changes_nothing(ledger, words, error):
    with pytest.raises(error):
        ledger.book(*words)
    assert set(ledger.balances.values()) == {0}
    assert ledger.journal == ()


def test_the_limit_is_given():
    from ledger import Ledger

    made = Ledger(limit=5)
    made.open_account("bank")
    made.open_account("ann")
    with pytest.raises(ValueError, match="limit"):
        made.book("bank", "ann", 6)


def test_accounts_are_opened_once(ledger):
    with pytest.raises(ValueError, match="ann exists"):
        ledger.open_account("ann")


def test_undo_is_an_entry_and_is_heard(ledger):
    heard = []
    stop = ledger.listen(heard.append)
    number = ledger.book("bank", "ann", 100)
    assert ledger.undo(number) == 1
    assert ledger.balances["ann"] == 0
    assert [entry[1:] for entry in heard] == [("bank", "ann", 100), ("ann", "bank", 100)]
    stop()
    ledger.book("bank", "bo", 1)
    assert len(heard) == 2


def test_statement(ledger):
    ledger.book("bank", "ann", 100)
    ledger.book("bank", "bo", 50)
    assert ledger.statement("ann") == [("bank", "ann", 100)]
