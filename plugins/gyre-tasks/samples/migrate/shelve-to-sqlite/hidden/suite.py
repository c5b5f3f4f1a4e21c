import ast
import sqlite3
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path):
    tree = ast.parse(Path("settings_store.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "sqlite3" in names
    assert not names & {"shelve", "pickle", "dbm"}
    return str(tmp_path / "settings.db")


@pytest.fixture
def made(path):
    from settings_store import Settings

    made = Settings(path)
    yield made
    made.close()


def test_set_get_and_default(made):
    made.set("ann", "theme", "dark")
    assert made.get("ann", "theme") == "dark"
    assert made.get("ann", "size") is None
    assert made.get("bo", "theme", "light") == "light"
    made.set("ann", "theme", "blue")
    assert made.get("ann", "theme") == "blue"


@pytest.mark.parametrize("value", [3, 2.5, True, None, "it's", [1, [2]], {"a": {"b": 1}}], ids=repr)
def test_values_come_back_as_they_were(made, value):
    made.set("ann", "x", value)
    assert made.get("ann", "x", "absent") == value
    assert type(made.get("ann", "x", "absent")) is type(value)


def test_what_is_set_is_kept_at_once(made, path):
    from settings_store import Settings

    made.set("ann", "theme", "dark")
    other = Settings(path)
    assert other.get("ann", "theme") == "dark"
    other.close()


def test_it_is_a_database(made, path):
    made.set("ann", "theme", "dark")
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0] >= 1


def test_all_and_remove(made):
    made.set("ann", "a", 1)
    made.set("ann", "b", 2)
    made.set("bo", "a", 3)
    made.remove("ann", "a")
    made.remove("ann", "never")
    assert made.all("ann") == {"b": 2}
    made.remove("ann")
    assert made.all("ann") == {}
    assert made.users() == ["bo"]


def test_users_without_settings_are_none(made):
    made.set("zed", "a", 1)
    made.set("ann", "a", 1)
    made.set("bo", "a", 1)
    made.remove("bo", "a")
    assert made.users() == ["ann", "zed"]


def test_with_value(made):
    made.set("zed", "theme", {"name": "dark", "size": 1})
    made.set("ann", "theme", {"size": 1, "name": "dark"})
    made.set("bo", "theme", "dark")
    made.set("bo", "other", {"name": "dark", "size": 1})
    assert made.with_value("theme", {"name": "dark", "size": 1}) == ["ann", "zed"]


def test_odd_names(made):
    made.set("rob'); DROP TABLE settings;--", "k\"", 1)
    assert made.all("rob'); DROP TABLE settings;--") == {"k\"": 1}


def test_a_transaction_is_done_whole_or_not_at_all(made):
    with made.transaction():
        made.set("ann", "a", 1)
        made.set("ann", "b", 2)
    with pytest.raises(RuntimeError), made.transaction():
        made.set("ann", "a", 9)
        raise RuntimeError("no")
    assert made.all("ann") == {"a": 1, "b": 2}
