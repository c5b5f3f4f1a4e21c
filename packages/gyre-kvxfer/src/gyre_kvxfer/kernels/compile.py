"""Compile `kv.cu`: to a cubin with NVRTC (no GPU and no driver needed), or to a host library with a C++ compiler."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gyre_kvxfer.errors import KVError, explain
from gyre_kvxfer.native import processor

HERE = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def source() -> str:
    """The text of kv.cu."""
    return (HERE / "kv.cu").read_text(encoding="utf-8")


def _nvrtc_files() -> Iterator[str]:
    """Where an NVRTC library may be: the nvidia wheels first, then the loader's path."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from map(str, sorted(Path(root).glob("*/lib/libnvrtc.so.*"), reverse=True))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def load_nvrtc() -> ctypes.CDLL:
    """The NVRTC library. Raises `KVError` if there is none."""
    for name in _nvrtc_files():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise KVError(explain("loading NVRTC", "no library", "libnvrtc", "pip install nvidia-cuda-nvrtc."))


def compile_cubin(arch: str) -> bytes:
    """kv.cu as a cubin for `arch` (`sm_90`). Raises `KVError` with the compiler's log."""
    lib = load_nvrtc()
    program = ctypes.c_void_p()
    text = source().encode()
    lib.nvrtcCreateProgram(ctypes.byref(program), text, b"kv.cu", 0, None, None)
    try:
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--device-as-default-execution-space"]
        code = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code:
            log = _text(lib, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise KVError(explain(f"compiling kv.cu for {arch}", log, "no errors", "Correct the source."))
        return _text(lib, program, "CUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    out = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, out)
    return out.raw


def build_host(folder: Path, compiler: str = "g++") -> ctypes.CDLL:
    """kv.cu built for this machine into `folder` (once per source and processor) and loaded. Raises `KVError`."""
    if shutil.which(compiler) is None:
        raise KVError(explain("building the host kernels", f"no {compiler}", "a C++ compiler", "Use numpy instead."))
    files = [HERE / n for n in ("kv.cu", "host_shim.h", "host_entry.cpp")]
    name = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]
    out = folder / f"gyre_kv_{name}-{processor()}.so"
    if not out.exists():
        part = folder / f"{out.name}.part"
        command = [compiler, "-O3", "-march=native", "-std=c++17", "-fno-strict-aliasing", "-shared", "-fPIC"]
        done = subprocess.run([*command, str(files[2]), "-o", str(part)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise KVError(explain("building the host kernels", done.stderr[-2000:], "no errors", "Correct the source."))
        part.rename(out)
    return ctypes.CDLL(str(out))
