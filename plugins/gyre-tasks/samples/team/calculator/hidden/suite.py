import subprocess
import sys

import pytest


def test_tokens():
    from tokens import tokens

    assert tokens(" 1 +2.5*(3)^4 ") == [
        ("number", 1.0), ("sign", "+"), ("number", 2.5), ("sign", "*"), ("sign", "("), ("number", 3.0), ("sign", ")"),
        ("sign", "^"), ("number", 4.0),
    ]
    assert tokens("") == []


@pytest.mark.parametrize("text", ["a", "1 & 2", "."])
def test_tokens_refuses(text):
    from tokens import tokens

    with pytest.raises(ValueError):
        tokens(text)


def listed(text):
    return [("number", float(c)) if c.isdigit() else ("sign", c) for c in text]


@pytest.mark.parametrize(("text", "tree"), [
    ("1+2*3", ("+", 1.0, ("*", 2.0, 3.0))), ("1-2-3", ("-", ("-", 1.0, 2.0), 3.0)),
    ("2^3^2", ("^", 2.0, ("^", 3.0, 2.0))), ("-2^2", ("neg", ("^", 2.0, 2.0))), ("2^-1", ("^", 2.0, ("neg", 1.0))),
    ("(1+2)*3", ("*", ("+", 1.0, 2.0), 3.0)), ("2*-3", ("*", 2.0, ("neg", 3.0))),
])
def test_parse(text, tree):
    from parse import parse

    assert parse(listed(text)) == tree


@pytest.mark.parametrize("text", ["", "1+", "(1", "1)", "12", "*1"])
def test_parse_refuses(text):
    from parse import parse

    with pytest.raises(ValueError):
        parse(listed(text))


def test_evaluate():
    from evaluate import evaluate

    assert evaluate(("+", 1.0, ("*", 2.0, ("neg", 3.0)))) == -5.0
    assert evaluate(("^", 2.0, ("/", 1.0, 2.0))) == pytest.approx(2**0.5)
    with pytest.raises(ValueError):
        evaluate(("/", 1.0, ("-", 1.0, 1.0)))


@pytest.mark.parametrize(("text", "value"), [("1 + 2 * 3", 7), ("-2^2", -4), ("2^3^2", 512), ("(1.5-4)/-0.5", 5)])
def test_calculate(text, value):
    from calc import calculate

    assert calculate(text) == pytest.approx(value)


def test_the_command():
    done = subprocess.run([sys.executable, "-S", "calc.py", "10", "/", "4"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2.5\n")
    done = subprocess.run([sys.executable, "-S", "calc.py", "1/0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
