import os
import signal
import subprocess
import sys
import tempfile
import time

FOLDER = tempfile.mkdtemp(dir=".")
COUNT = os.path.join(FOLDER, "count")
CHILD = f"import os, sys; open({COUNT!r}, 'a').write('x'); runs = os.path.getsize({COUNT!r}); "


def start(*words, **more):
    return subprocess.Popen([sys.executable, "supervise.py", *words], stdout=subprocess.PIPE, text=True, **more)


def child(last):
    return [sys.executable, "-c", CHILD + last]


def runs():
    return os.path.getsize(COUNT)


def retry():
    process = start("3", *child("sys.exit(0 if runs == 3 else 7)"))
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out, runs()) == (0, "exit 7\nexit 7\nexit 0\n", 3), (process.returncode, out)


def once():
    process = start("5", *child("pass"))
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out, runs()) == (0, "exit 0\n", 1), (process.returncode, out)


def gave_up():
    process = start("2", *child("sys.exit(9)"))
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out, runs()) == (9, "exit 9\nexit 9\nexit 9\ngave up\n", 3), (process.returncode, out)


def stop():
    process = start("5", *child("import time; time.sleep(30)"))
    try:
        deadline = time.monotonic() + 10
        while not os.path.exists(COUNT) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        process.terminate()
        out, _ = process.communicate(timeout=10)
        assert (process.returncode, out, runs()) == (143, "exit -15\n", 1), (process.returncode, out)
    finally:
        process.kill()


def usage():
    for words in (("3",), ("x", "true"), ()):
        process = start(*words, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=10)
        assert (process.returncode, err) == (1, "usage: supervise.py RETRIES COMMAND...\n"), err


globals()[sys.argv[1]]()
