"""Keeps a program running: supervise.py RETRIES COMMAND..."""

import signal
import subprocess
import sys


def supervise(retries, command):
    stopping = []
    child = None

    def stop(number, frame):
        stopping.append(number)
        if child is not None:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    for attempt in range(retries + 1):
        child = subprocess.Popen(command)
        if stopping:
            child.terminate()
        code = child.wait()
        print(f"exit {code}", flush=True)
        if code == 0:
            return 0
        if stopping:
            return 143
    print("gave up", flush=True)
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        sys.exit("usage: supervise.py RETRIES COMMAND...")
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2:]))
