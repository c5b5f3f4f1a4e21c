"""Statistics of a mailing list, for Python 3."""

import functools
from io import BytesIO


@functools.total_ordering
class Letter:
    def __init__(self, sender, subject, size):
        self.sender, self.subject, self.size = sender, subject, size

    def _key(self):
        return self.size, self.sender

    def __eq__(self, other):
        return self._key() == other._key()

    def __lt__(self, other):
        return self._key() < other._key()

    def __hash__(self):
        return hash(self._key())


def parse(data):
    """Letters of a byte string: sender, subject and size, a line each, in Latin-1."""
    letters = []
    for line in BytesIO(data):
        try:
            sender, subject, size = line.decode("latin-1").strip().split("|")
            letters.append(Letter(sender, subject, int(size)))
        except ValueError as error:
            print(error)
    return letters


def by_sender(letters):
    """(sender, number of letters), most letters first, then by name."""
    counts = {}
    for letter in letters:
        counts[letter.sender] = counts.get(letter.sender, 0) + 1
    return sorted(counts.items(), key=lambda row: (-row[1], row[0]))


def mean_size(letters):
    """Rounded down to a whole number; 0 of none."""
    if not letters:
        return 0
    return sum(letter.size for letter in letters) / len(letters)


def threads(letters):
    """Subject without "Re: " -> its letters, smallest first."""
    found = {}
    for letter in letters:
        key = letter.subject.strip()
        while key[:4].lower() == "re: ":
            key = key[4:]
        found.setdefault(key, []).append(letter)
    return found


def report(letters):
    """As bytes in UTF-8."""
    lines = ["%s: %d" % row for row in by_sender(letters)]
    lines += [f"{number} {subject}" for number, subject in zip(range(1, 4), sorted(threads(letters)))]
    return "\n".join(lines).encode("utf-8")
