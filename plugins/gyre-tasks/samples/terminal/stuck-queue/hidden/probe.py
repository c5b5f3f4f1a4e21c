import os
import shutil
import subprocess
import sys
import tempfile

FOLDER = tempfile.mkdtemp(dir=".")
shutil.copy("worker.py", FOLDER)
STANDING = "worker.lock" in os.listdir(".")
LEFT = sorted(os.listdir("inbox"))
os.chdir(FOLDER)
os.mkdir("inbox")


def work():
    return subprocess.run([sys.executable, "worker.py"], capture_output=True, text=True, timeout=10)


def job(name, text):
    with open(f"inbox/{name}", "w") as file:
        file.write(text)


def stale():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with open("worker.lock", "w") as file:
        file.write(str(child.pid))
    job("a", "3 + 4")
    work()
    assert open("done/a").read() == "7\n"


def busy():
    with open("worker.lock", "w") as file:
        file.write(str(os.getpid()))
    job("a", "3 + 4")
    assert work().returncode == 1
    assert os.listdir("inbox") == ["a"]


def poison():
    job("a", "1 + 1")
    job("b", "seven of nine")
    job("c", "9 * 9")
    job("d", "1 - 8")
    work()
    assert open("done/a").read() == "2\n"
    assert open("done/d").read() == "-7\n"
    assert open("dead/b").read() == "seven of nine"
    assert open("dead/c").read() == "9 * 9"
    assert {"b.reason", "c.reason"} <= set(os.listdir("dead"))
    assert os.listdir("inbox") == []


def unlock():
    job("a", "1 + 1")
    work()
    job("b", "2 + 2")
    assert work().returncode == 0
    assert open("done/b").read() == "4\n"
    assert "worker.lock" not in os.listdir(".")


def backlog():
    os.chdir("..")
    assert not STANDING and LEFT == [], (STANDING, LEFT)
    assert open("done/0003").read() == "58\n" and open("done/0004").read() == "-5\n"
    assert open("dead/0002").read() == "twelve + 1\n"


{"stale": stale, "busy": busy, "poison": poison, "unlock": unlock, "backlog": backlog}[sys.argv[1]]()
