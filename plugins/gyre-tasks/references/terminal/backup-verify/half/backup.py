"""Backups of a folder: backup.py create SOURCE STORE | verify STORE | restore STORE TARGET."""

import hashlib
import json
import shutil
import sys
from pathlib import Path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def create(source, store):
    index = {}
    for path in sorted(source.rglob("*")):
        if path.is_file():
            name = path.relative_to(source).as_posix()
            kept = store / "files" / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept)
            index[name] = digest(path)
    store.mkdir(parents=True, exist_ok=True)
    (store / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    print(f"{len(index)} files")


def damage(store):
    index = json.loads((store / "index.json").read_text())
    for name, expected in index.items():
        kept = store / "files" / name
        if not kept.is_file():
            yield f"missing {name}"
        elif not expected:
            yield f"damaged {name}"


def verify(store):
    found = list(damage(store))
    print("\n".join(found) or "good")
    return 1 if found else 0


def restore(store, target):
    found = list(damage(store))
    if found:
        print("\n".join(found))
        return 1
    for name in json.loads((store / "index.json").read_text()):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store / "files" / name, path)
    print("restored")
    return 0


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    sys.exit({"create": create, "verify": verify, "restore": restore}[command](*map(Path, words)))
