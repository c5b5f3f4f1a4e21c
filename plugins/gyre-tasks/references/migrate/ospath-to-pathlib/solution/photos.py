"""Houses of a photo collection, with pathlib."""

from pathlib import Path

PICTURES = (".jpg", ".jpeg", ".png")


def pictures(folder):
    """All pictures below a folder, sorted."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in PICTURES and path.is_file())


def target_of(path, year, album):
    """Where a picture goes: year/album/name, spaces as underscores."""
    return Path(str(year), album, Path(path).name.replace(" ", "_"))


def free_name(path):
    """`path`, or the first of path-1, path-2, ... that is not there."""
    path = free = Path(path)
    number = 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def move(path, root, year, album):
    """Move a picture into the collection; its new place."""
    target = free_name(Path(root) / target_of(path, year, album))
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(path).rename(target)


def size(folder):
    """Bytes of all pictures."""
    return sum(path.stat().st_size for path in pictures(folder))


def relative(path, root):
    """`path` seen from `root`; ValueError when it is not below."""
    return Path(path).resolve().relative_to(Path(root).resolve())


def clean(root):
    """Remove empty folders below `root`, not `root` itself; how many."""
    removed = 0
    for folder in sorted((path for path in Path(root).rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
            removed += 1
    return removed
