import sys

from evaluate import evaluate
from parse import parse
from tokens import tokens


def calculate(text):
    return evaluate(parse(tokens(text)))


if __name__ == "__main__":
    try:
        print(f"{calculate(' '.join(sys.argv[1:])):g}")
    except ValueError as error:
        sys.exit(f"error: {error}")
