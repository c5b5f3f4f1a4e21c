"""A shelf of books on the command line, with kommand."""

import json
import sys

from kommand import UsageError, command, run

PATH = "shelf.json"


def load():
    try:
        with open(PATH) as file:
            return json.load(file)
    except FileNotFoundError:
        return []


def save(books):
    with open(PATH, "w") as file:
        json.dump(books, file)


def number(text):
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"not a number: {text}") from None


@command("add", "TITLE", "YEAR", "--read")
def add(title, year, read):
    year = number(year)
    books = load()
    if any(book["title"] == title for book in books):
        raise UsageError(f"{title} is on the shelf")
    books.append({"title": title, "year": year, "read": read})
    save(books)
    return f"added {title}"


@command("remove", "TITLE")
def remove(title):
    books = load()
    left = [book for book in books if book["title"] != title]
    if len(left) == len(books):
        raise UsageError(f"no {title} on the shelf")
    save(left)
    return f"removed {title}"


@command("list", "--read", "--sort=title")
def show(read, sort):
    if sort not in ("title", "year"):
        raise UsageError(f"cannot sort by {sort}")
    books = sorted((book for book in load() if book["read"] or not read), key=lambda book: book[sort])
    lines = [f"{book['title']} ({book['year']})" + (" *" if book["read"] else "") for book in books]
    return "\n".join(lines)


@command("count", "--since=0")
def count(since):
    since = number(since)
    return sum(since <= book["year"] for book in load())


def main(argv):
    run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
