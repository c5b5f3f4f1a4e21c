import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = os.path.abspath("backup.py")
os.chdir(tempfile.mkdtemp(dir="."))
FILES = {"a.txt": b"alpha", "deep/er/b.bin": bytes(range(256)), "empty": b"", "deep/c": b"gamma"}
for name, data in FILES.items():
    Path("source", name).parent.mkdir(parents=True, exist_ok=True)
    Path("source", name).write_bytes(data)


def backup(*words):
    done = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, timeout=20)
    return done.returncode, done.stdout.strip()


def below(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def whole():
    assert backup("create", "source", "store") == (0, "4 files")
    assert below("store/files") == FILES
    assert backup("verify", "store") == (0, "good")


def damage():
    backup("create", "source", "store")
    Path("store/files/a.txt").write_bytes(b"alphA")
    assert backup("verify", "store") == (1, "damaged a.txt")
    Path("store/files/a.txt").unlink()
    assert backup("verify", "store") == (1, "missing a.txt")


def restore():
    backup("create", "source", "store")
    assert backup("restore", "store", "target") == (0, "restored")
    assert below("target") == FILES


def careful():
    backup("create", "source", "store")
    Path("full").mkdir()
    Path("full/mine").write_text("keep")
    assert backup("restore", "store", "full") == (1, "target is not empty")
    assert below("full") == {"mine": b"keep"}
    Path("store/files/a.txt").write_bytes(b"alphA")
    assert backup("restore", "store", "target") == (1, "damaged a.txt")
    assert not Path("target").exists() or below("target") == {}


globals()[sys.argv[1]]()
