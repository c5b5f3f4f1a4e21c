"""Rotates a log: rotate.py LOG KEEP. LOG becomes LOG.1, LOG.1 becomes LOG.2, and so on; KEEP old ones stay."""

import os
import sys


def rotate(log, keep):
    if not os.path.exists(log):
        return 0
    for number in range(1, keep + 1):
        old = f"{log}.{number}"
        if os.path.exists(old):
            if number == keep:
                os.remove(old)
            else:
                os.rename(old, f"{log}.{number + 1}")
    if keep:
        os.rename(log, f"{log}.1")
    return 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: rotate.py LOG KEEP")
    print("rotated" if rotate(sys.argv[1], int(sys.argv[2])) else "nothing to do")
