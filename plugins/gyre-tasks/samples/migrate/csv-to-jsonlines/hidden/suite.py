import json

import pytest


@pytest.fixture
def made(tmp_path):
    from journal import Journal

    first = Journal(str(tmp_path / "first.jsonl"))
    first.append(1, "t1", 2.5)
    assert json.loads((tmp_path / "first.jsonl").read_text().splitlines()[0])["sensor"] == "t1"
    return Journal(str(tmp_path / "j.jsonl"))


def lines(made):
    with open(made.path, encoding="utf-8") as file:
        return file.read().splitlines()


def test_a_row_is_a_line_of_json(made):
    made.append(1, "t1", 2.5, "warm, \"very\"\nso")
    assert [json.loads(line) for line in lines(made)] == [
        {"time": 1, "sensor": "t1", "value": 2.5, "note": "warm, \"very\"\nso"}
    ]


def test_rows_come_back(made):
    made.append(1, "t1", 2.5)
    made.append(2, "größe", 3, "ok")
    assert list(made.rows()) == [(1, "t1", 2.5, ""), (2, "größe", 3, "ok")]


def test_no_file_is_no_rows(made):
    assert list(made.rows()) == []
    assert made.last("t1") is None
    assert made.mean("t1") is None


def test_last_and_mean(made):
    for time, value in enumerate((1.0, 2.0, 6.0)):
        made.append(time, "a", value)
        made.append(time, "b", 0.0)
    assert made.last("a") == (2, "a", 6.0, "")
    assert made.mean("a") == 3.0
    assert made.mean("c") is None


def test_appending_does_not_touch_what_is_there(made):
    made.append(1, "a", 1.0)
    with open(made.path, "r+b") as file:
        file.write(b"{ ")
    before = open(made.path, "rb").read()
    made.append(2, "a", 1.0)
    assert open(made.path, "rb").read().startswith(before)


def test_reading_is_lazy(made):
    made.append(1, "a", 1.0)
    with open(made.path, "a") as file:
        file.write("not json\n")
    rows = made.rows()
    assert next(rows) == (1, "a", 1.0, "")
    with pytest.raises(ValueError):
        next(rows)


def test_a_torn_last_line_is_cut_off(made):
    from journal import Journal

    made.append(1, "a", 1.0)
    with open(made.path, "a") as file:
        file.write('{"time": 2, "sen')
    again = Journal(made.path)
    again.append(3, "a", 3.0)
    assert [row[0] for row in again.rows()] == [1, 3]


def test_an_old_journal_is_converted(tmp_path):
    from journal import Journal, convert

    old = tmp_path / "old.csv"
    old.write_text('time,sensor,value,note\n1,a,2.5,"x, y"\n2,b,-1,\n')
    assert convert(str(old), str(tmp_path / "new.jsonl")) == 2
    assert list(Journal(str(tmp_path / "new.jsonl")).rows()) == [(1, "a", 2.5, "x, y"), (2, "b", -1.0, "")]
