import pytest


@pytest.mark.parametrize(
    ("title", "expected"),
    [("Hello, World!", "hello-world"), ("Crème brûlée", "creme-brulee"), ("  a -- b  ", "a-b"), ("2 + 2 = 4", "2-2-4")],
)
def test_slug(title, expected):
    from slugs import slug

    assert slug(title) == expected


def test_nothing_left():
    from slugs import slug

    with pytest.raises(ValueError):
        slug("?!")


def test_unique():
    from slugs import unique

    assert unique("A b", set()) == "a-b"
    assert unique("A b", {"a-b", "a-b-2"}) == "a-b-3"


def test_unique_keeps_a_free_one():
    from slugs import unique

    assert unique("A b", {"a-b-2"}) == "a-b"
