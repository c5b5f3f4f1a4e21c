import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp(dir="."))


def intake(text, code=None):
    source = FOLDER / "day.csv"
    source.write_bytes(text.encode())
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "intake.py", source, FOLDER / "out"], capture_output=True, text=True, timeout=10
        )
    assert code is None or done.returncode == code, done
    return tuple((FOLDER / "out" / name).read_bytes().decode() for name in ("totals.csv", "rejected.csv"))


def plain():
    totals, rejected = intake("customer,amount,note\nbo,2.50,\nal,1.00,x\nbo,0.25,y\n", 0)
    assert totals == "customer,total\nal,1.00\nbo,2.75\n", totals
    assert rejected == "line,reason\n"


def exact():
    rows = "".join("al,0.10,\n" for _ in range(1000)) + "al,123456789012345.67,\nbo,-3.30,\n"
    totals, _ = intake("customer,amount,note\n" + rows, 0)
    assert totals == "customer,total\nal,123456789012445.67\nbo,-3.30\n", totals


def quoted():
    text = "\ufeffcustomer,amount,note\r\n\"Smith, Jo\",1.50,\"said \"\"hi\"\"\"\r\nJörg,2.00,\"two\r\nlines\"\r\n"
    totals, rejected = intake(text, 0)
    assert totals == 'customer,total\nJörg,2.00\n"Smith, Jo",1.50\n', totals
    assert rejected == "line,reason\n"


def rejected():
    text = "customer,amount,note\nal,1.00,\nbo,much,\n,2.00,\n\nal,1.0,\nal,3.00\nal,4.00,ok\n"
    totals, refused = intake(text, 1)
    assert totals == "customer,total\nal,5.00\n", totals
    assert refused == "line,reason\n3,bad amount\n4,no customer\n6,bad amount\n7,2 fields\n", refused


globals()[sys.argv[1]]()
