import subprocess
import sys


def told(size, text):
    done = subprocess.run(
        [sys.executable, "cache.py", str(size)], input=text, capture_output=True, text=True, timeout=10
    )
    return done.stdout.splitlines()


def bound():
    said = told(2, "SET a 1\nSET b 2\nSET c 3\nGET a\nGET b\nGET c\nSTATS\n")
    assert said == ["OK"] * 3 + ["MISS", "HIT 2", "HIT 3", "2 entries 2 hits 1 misses 1 evicted"], said


def recent():
    said = told(2, "SET a 1\nSET b 2\nGET a\nSET c 3\nGET a\nGET b\n")
    assert said[-2:] == ["HIT 1", "MISS"], said
    said = told(2, "SET a 1\nSET b 2\nSET a 9\nSET c 3\nGET a\nGET b\n")
    assert said[-2:] == ["HIT 9", "MISS"], said


def expiry():
    said = told(9, "SET a 1 10\nSET b 2\nTICK 9\nGET a\nTICK 1\nGET a\nGET b\nSTATS\n")
    assert said[3:] == ["HIT 1", "OK", "MISS", "HIT 2", "1 entries 2 hits 1 misses 0 evicted"], said
    said = told(9, "SET a 1 5\nTICK 3\nSET a 2 5\nTICK 3\nGET a\n")
    assert said[-1] == "HIT 2", said


def room():
    said = told(2, "SET a 1 5\nSET b 2\nTICK 5\nSET c 3\nGET b\nGET a\nGET c\nSTATS\n")
    assert said[-4:] == ["HIT 2", "MISS", "HIT 3", "2 entries 2 hits 1 misses 0 evicted"], said


def errors():
    said = told(2, "SET a\n\nTICK soon\nHELLO\nSET a 1 x\nGET a\n")
    assert said == ["ERR"] * 5 + ["MISS"], said


globals()[sys.argv[1]]()
