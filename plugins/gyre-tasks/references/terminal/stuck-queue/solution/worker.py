"""Works through jobs: every file of inbox/ holds one sum such as "3 + 4". Run until the inbox is empty."""

import os
from pathlib import Path

LOCK = Path("worker.lock")
INBOX, DONE, DEAD = Path("inbox"), Path("done"), Path("dead")


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def lock():
    try:
        other = int(LOCK.read_text())
    except (FileNotFoundError, ValueError):
        other = None
    if other is not None and running(other):
        raise SystemExit(f"worker {other} is running")
    LOCK.write_text(str(os.getpid()))


def compute(text):
    left, sign, right = text.split()
    if sign == "+":
        return int(left) + int(right)
    if sign == "-":
        return int(left) - int(right)
    raise ValueError(f"no operation {sign}")


def work(job):
    try:
        result = compute(job.read_text())
    except ValueError as error:
        (DEAD / f"{job.name}.reason").write_text(f"{error}\n")
        job.rename(DEAD / job.name)
        return
    (DONE / job.name).write_text(f"{result}\n")
    job.unlink()


def main():
    lock()
    try:
        for folder in (INBOX, DONE, DEAD):
            folder.mkdir(exist_ok=True)
        for job in sorted(INBOX.iterdir()):
            work(job)
    finally:
        LOCK.unlink()


if __name__ == "__main__":
    main()
