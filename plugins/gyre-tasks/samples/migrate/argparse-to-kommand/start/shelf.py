"""A shelf of books on the command line, with argparse."""

import argparse
import json
import sys

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


def add(args):
    books = load()
    if any(book["title"] == args.title for book in books):
        sys.exit(f"error: {args.title} is on the shelf")
    books.append({"title": args.title, "year": args.year, "read": args.read})
    save(books)
    print(f"added {args.title}")


def remove(args):
    books = load()
    left = [book for book in books if book["title"] != args.title]
    if len(left) == len(books):
        sys.exit(f"error: no {args.title} on the shelf")
    save(left)
    print(f"removed {args.title}")


def show(args):
    books = [book for book in load() if book["read"] or not args.read]
    for book in sorted(books, key=lambda book: book[args.sort]):
        print(f"{book['title']} ({book['year']})" + (" *" if book["read"] else ""))


def count(args):
    print(sum(args.since <= book["year"] for book in load()))


def parser():
    top = argparse.ArgumentParser(prog="shelf")
    sub = top.add_subparsers(required=True)
    each = sub.add_parser("add")
    each.add_argument("title")
    each.add_argument("year", type=int)
    each.add_argument("--read", action="store_true")
    each.set_defaults(do=add)
    each = sub.add_parser("remove")
    each.add_argument("title")
    each.set_defaults(do=remove)
    each = sub.add_parser("list")
    each.add_argument("--read", action="store_true")
    each.add_argument("--sort", choices=["title", "year"], default="title")
    each.set_defaults(do=show)
    each = sub.add_parser("count")
    each.add_argument("--since", type=int, default=0)
    each.set_defaults(do=count)
    return top


if __name__ == "__main__":
    args = parser().parse_args()
    args.do(args)
