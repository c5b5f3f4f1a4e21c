"""pytest as one zip archive, to be brought into a sandbox that has none, or one that the agent may have changed.

Invariant: the archive holds the modules of the pytest that is installed here, pure Python, nothing else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import marshal
import os
import zipfile

_MODULES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
_DISTRIBUTIONS = ("pytest", "pluggy")
"""Whose version is asked for at run time."""
_LEFT_OUT = ("pygments/lexers", "pygments/styles")


@functools.cache
def pytest_archive() -> bytes:
    """The archive; the same bytes at every call."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in _MODULES:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations:
                _add(archive, spec.submodule_search_locations[0])
            elif spec is not None and spec.origin is not None:
                _add_file(archive, spec.origin, os.path.basename(spec.origin))
        for name in _DISTRIBUTIONS:
            version = importlib.metadata.version(name)
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            archive.writestr(zipfile.ZipInfo(f"{name}-{version}.dist-info/METADATA"), text)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, folder: str) -> None:
    parent = os.path.dirname(folder)
    for here, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            inside = os.path.relpath(os.path.join(here, file), parent)
            wanted = not inside.startswith(_LEFT_OUT) or file in (
                "__init__.py",
                "_mapping.py",
                "python.py",
                "diff.py",
                "default.py",
            )
            if file.endswith(".py") and wanted:
                _add_file(archive, os.path.join(here, file), inside)


def _add_file(archive: zipfile.ZipFile, path: str, inside: str) -> None:
    """The source, and for a Python like ours the compiled form, which another one passes over."""
    with open(path, "rb") as file:
        source = file.read()
    archive.writestr(zipfile.ZipInfo(inside), source)
    code = compile(source, inside, "exec", dont_inherit=True)
    unchecked = (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    archive.writestr(zipfile.ZipInfo(f"{inside}c"), importlib.util.MAGIC_NUMBER + unchecked + marshal.dumps(code))
