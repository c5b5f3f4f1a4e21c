import pytest

DATA = "jörg|Re: Boats|120\nann|Boats|80\njörg|Re: re: boats?|301\nbo|Tea|7\n".encode("latin-1")


@pytest.fixture
def maillist(tmp_path, monkeypatch):
    import maillist

    monkeypatch.chdir(tmp_path)
    return maillist


@pytest.fixture
def letters(maillist):
    return maillist.parse(DATA)


def test_parse(letters):
    assert [(l.sender, l.subject, l.size) for l in letters][0] == ("jörg", "Re: Boats", 120)
    assert len(letters) == 4
    assert all(isinstance(l.sender, str) for l in letters)


def test_lines_that_are_no_letters_are_noted(maillist, tmp_path):
    assert len(maillist.parse(b"a|b|1\nnonsense\nx|y|many\n")) == 1
    assert (tmp_path / "errors.log").read_text().count("\n") == 2


def test_letters_are_ordered_and_equal(maillist):
    small, large = maillist.Letter("b", "s", 1), maillist.Letter("a", "s", 2)
    assert small < large and large > small and small <= large and large >= small
    assert maillist.Letter("a", "x", 1) == maillist.Letter("a", "y", 1)
    assert maillist.Letter("a", "x", 1) != maillist.Letter("b", "x", 1)
    assert sorted([large, small]) == [small, large]


def test_by_sender(maillist, letters):
    assert maillist.by_sender(letters) == [("jörg", 2), ("ann", 1), ("bo", 1)]
    assert isinstance(maillist.by_sender(letters), list)


def test_mean_size_is_whole(maillist, letters):
    assert maillist.mean_size(letters) == 127
    assert isinstance(maillist.mean_size(letters), int)
    assert maillist.mean_size([]) == 0


def test_a_mean_of_large_sizes_is_exact(maillist):
    size = 3 * (2**60) + 2
    assert maillist.mean_size([maillist.Letter("a", "s", size)]) == size


def test_threads(maillist, letters):
    found = maillist.threads(letters)
    assert sorted(found) == ["Boats", "Tea", "boats?"]
    assert [l.size for l in found["Boats"]] == [80, 120]


def test_report(maillist, letters):
    assert maillist.report(letters) == "jörg: 2\nann: 1\nbo: 1\n1 Boats\n2 Tea\n3 boats?".encode()
