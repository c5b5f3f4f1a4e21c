import os
import shutil
import subprocess
import sys
import tempfile

FOLDER = tempfile.mkdtemp(dir=".")
shutil.copy("show.py", FOLDER)
DEFAULTS = "[app]\nhost = localhost\nport = 8080\ndebug = false\ntimeout = 2.5\n"


def show(*words, local=None, defaults=DEFAULTS, **env):
    for name, text in (("defaults.ini", defaults), ("local.ini", local)):
        path = os.path.join(FOLDER, name)
        if text is not None:
            with open(path, "w") as file:
                file.write(text)
    return subprocess.run(
        [sys.executable, "show.py", *words], cwd=FOLDER, env={"PATH": os.environ["PATH"], **env},
        capture_output=True, text=True, timeout=10,
    )


def layers():
    assert show("port").stdout == "port = 8080\n"
    assert show("port", local="[app]\nport = 9000\n").stdout == "port = 9000\n"
    assert show("port", "host", APP_PORT="9999").stdout == "port = 9999\nhost = 'localhost'\n"


def booleans():
    assert show("debug").stdout == "debug = False\n"
    for text, value in (("Yes", True), ("TRUE", True), ("0", False), ("no", False)):
        assert show("debug", APP_DEBUG=text).stdout == f"debug = {value}\n"
    done = show("debug", APP_DEBUG="perhaps")
    assert done.returncode == 1 and "debug" in done.stderr and "Traceback" not in done.stderr


def numbers():
    done = show(APP_PORT="eighty")
    assert done.returncode == 1 and "port" in done.stderr and "Traceback" not in done.stderr
    assert show("timeout", APP_TIMEOUT="7").stdout == "timeout = 7.0\n"


def unknown():
    done = show(local="[app]\nprot = 80\n")
    assert done.returncode == 1 and "prot" in done.stderr and "Traceback" not in done.stderr


def percent():
    assert show("host", local="[app]\nhost = fe80::1%eth0\n").stdout == "host = 'fe80::1%eth0'\n"


globals()[sys.argv[1]]()
