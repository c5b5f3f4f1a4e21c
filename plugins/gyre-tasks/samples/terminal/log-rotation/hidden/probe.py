import os
import subprocess
import sys
import tempfile

PROGRAM = os.path.abspath("rotate.py")
FOLDER = tempfile.mkdtemp(dir=".")
os.chdir(FOLDER)


def rotate(*words):
    return subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, timeout=10)


def say(text, name="app.log"):
    with open(name, "a") as file:
        file.write(text)


def seen():
    return {name: open(name).read() for name in sorted(os.listdir("."))}


def order():
    for number in range(3):
        say(f"day {number}\n")
        rotate("app.log", "3")
    found = {name: text for name, text in seen().items() if name != "app.log"}
    assert found == {"app.log.1": "day 2\n", "app.log.2": "day 1\n", "app.log.3": "day 0\n"}, found


def bound():
    for number in range(6):
        say(f"day {number}\n")
        rotate("app.log", "2")
    found = {name: text for name, text in seen().items() if name != "app.log"}
    assert found == {"app.log.1": "day 5\n", "app.log.2": "day 4\n"}, found


def fresh():
    say("x\n")
    assert rotate("app.log", "3").stdout == "rotated\n"
    assert seen()["app.log"] == ""


def empty():
    say("x\n")
    rotate("app.log", "3")
    say("")
    assert rotate("app.log", "3").stdout == "nothing to do\n"
    assert seen()["app.log.1"] == "x\n"
    assert rotate("absent.log", "3").stdout == "nothing to do\n"


def usage():
    say("x\n")
    for words in ((), ("app.log",), ("app.log", "three")):
        done = rotate(*words)
        assert done.returncode == 1 and done.stderr == "usage: rotate.py LOG KEEP\n", done
    assert seen() == {"app.log": "x\n"}


{"order": order, "bound": bound, "fresh": fresh, "empty": empty, "usage": usage}[sys.argv[1]]()
