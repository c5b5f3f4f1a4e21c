# -*- coding: utf-8 -*-
"""Statistics of a mailing list, for Python 2."""

import itertools
import string
from StringIO import StringIO


class Letter:
    def __init__(self, sender, subject, size):
        self.sender, self.subject, self.size = sender, subject, size

    def __cmp__(self, other):
        return cmp((self.size, self.sender), (other.size, other.sender))


def parse(data):
    """Letters of a byte string: sender, subject and size, a line each, in Latin-1."""
    letters = []
    for line in StringIO(data):
        try:
            sender, subject, size = line.decode("latin-1").strip().split(u"|")
            letters.append(Letter(sender, subject, int(size)))
        except ValueError, error:
            print >>open("errors.log", "a"), "%s: %r" % (error, line)
    return letters


def by_sender(letters):
    """(sender, number of letters), most letters first, then by name."""
    counts = {}
    for letter in letters:
        counts[letter.sender] = counts.get(letter.sender, 0) + 1
    rows = counts.items()
    rows.sort(lambda a, b: cmp(b[1], a[1]) or cmp(a[0], b[0]))
    return rows


def mean_size(letters):
    """Rounded down to a whole number; 0 of none."""
    if not letters:
        return 0
    return sum(map(lambda letter: letter.size, letters)) / len(letters)


def threads(letters):
    """Subject without "Re: " -> its letters, smallest first."""
    found = {}
    for letter in letters:
        key = string.strip(letter.subject)
        while key[:4].lower() == "re: ":
            key = key[4:]
        if not found.has_key(key):
            found[key] = []
        found[key].append(letter)
    for letters in found.itervalues():
        letters.sort()
    return found


def report(letters):
    """As bytes in UTF-8."""
    lines = [u"%s: %d" % row for row in by_sender(letters)]
    lines += map(lambda pair: u"%s %s" % pair, itertools.izip(xrange(1, 4), sorted(threads(letters).keys())))
    return u"\n".join(lines).encode("utf-8")
