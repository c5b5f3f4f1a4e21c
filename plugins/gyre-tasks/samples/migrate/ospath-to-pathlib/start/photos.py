"""Houses of a photo collection, with os.path and names as text."""

import os
import shutil

PICTURES = (".jpg", ".jpeg", ".png")


def pictures(folder):
    """All pictures below a folder, sorted."""
    found = []
    for here, folders, files in os.walk(folder):
        for name in files:
            if os.path.splitext(name)[1].lower() in PICTURES:
                found.append(os.path.join(here, name))
    return sorted(found)


def target_of(path, year, album):
    """Where a picture goes: year/album/name, spaces as underscores."""
    name = os.path.basename(path).replace(" ", "_")
    return os.path.join(str(year), album, name)


def free_name(path):
    """`path`, or the first of path-1, path-2, ... that is not there."""
    stem, suffix = os.path.splitext(path)
    number = 0
    while os.path.exists(path):
        number += 1
        path = stem + "-" + str(number) + suffix
    return path


def move(path, root, year, album):
    """Move a picture into the collection; its new place."""
    target = free_name(os.path.join(root, target_of(path, year, album)))
    if not os.path.isdir(os.path.dirname(target)):
        os.makedirs(os.path.dirname(target))
    shutil.move(path, target)
    return target


def size(folder):
    """Bytes of all pictures."""
    return sum(os.path.getsize(path) for path in pictures(folder))


def relative(path, root):
    """`path` seen from `root`; ValueError when it is not below."""
    result = os.path.relpath(path, root)
    if result.startswith(os.pardir):
        raise ValueError(path + " is not below " + root)
    return result


def clean(root):
    """Remove empty folders below `root`, not `root` itself; how many."""
    removed = 0
    for here, folders, files in os.walk(root, topdown=False):
        if here != root and not os.listdir(here):
            os.rmdir(here)
            removed += 1
    return removed
