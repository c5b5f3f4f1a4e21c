import pytest


@pytest.mark.parametrize(("text", "width", "lines"), [
    ("a bb ccc dddd", 6, ["a bb", "ccc", "dddd"]), ("a bb ccc", 8, ["a bb ccc"]), ("", 5, []),
    ("incomprehensible a", 5, ["incomprehensible", "a"]), ("a \n b", 9, ["a b"]),
])
def test_wrap(text, width, lines):
    from wrap import wrap

    assert wrap(text, width) == lines


def test_table():
    from table import table

    assert table([("name", "n"), ("bolt", 12), ("x", 3)]) == ["name  n", "bolt  12", "x      3"]
    assert table([]) == []


def test_table_refuses():
    from table import table

    with pytest.raises(ValueError):
        table([(1, 2), (1,)])


def test_outline():
    from outline import outline

    tree = [("A", [("B", []), ("C", [("D", [])])]), ("E", [])]
    assert outline(tree) == ["1. A", "  1. B", "  2. C", "    1. D", "2. E"]
    assert outline([]) == []


def test_document():
    from document import document

    made = document("Stock", "what is left of it", [("bolt", 2)], [("End", [])], 10)
    assert made == "Stock\n=====\n\nwhat is\nleft of it\n\nbolt  2\n\n1. End\n"


def test_a_document_without_parts():
    from document import document

    assert document("T", "", [], []) == "T\n=\n"
