"""Runs commands one at a time under limits and ends every process they leave behind.

Invariant: when a reply is sent, no process that the command started is alive, and at most `output` bytes of what it
printed were kept; the rest was read and counted. One frame in, one frame out, over a stream socket: two lengths of
4 bytes (JSON, bytes that follow it), the JSON, the bytes. A frame or end of file while a command runs ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from gyre_harnesses.sandbox.keeper import usage
from gyre_harnesses.sandbox.keeper.confine import Kept

_CHUNK = 1 << 16
_FLOOD_BYTES = 1 << 28
"""A command that printed this much more than is kept is ended: reading on would only burn a core."""
_LOOK_S = 0.25
"""Seconds between two looks at the disk that the workspace uses."""


def serve(channel: socket.socket, kept: Kept) -> None:
    """Say what was set up, then answer requests until the other side closes."""
    seen = {"work": kept.work, "home": kept.home, "tmp": kept.tmp}
    _send(channel, {"ready": kept.setup.isolation, "seen": seen, "problems": kept.problems}, b"")
    try:
        while True:
            frame = _receive(channel)
            if frame is None:
                return
            header, stdin = frame
            if header["op"] == "run":
                reply, output = _Command(kept, channel, header).run(stdin)
                _send(channel, reply, output)
            elif header["op"] == "listen":
                _listen(channel)
    finally:
        end_all(kept)


def _send(channel: socket.socket, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    channel.sendall(struct.pack("!II", len(text), len(data)) + text + data)


def _listen(channel: socket.socket) -> None:
    """Hand over a socket that listens on the loopback that commands see; they reach us through it."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        socket.send_fds(channel, [b"!"], [server.fileno()])


def _receive(channel: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    head = _exactly(channel, 8)
    if head is None:
        return None
    text_size, data_size = struct.unpack("!II", head)
    text = _exactly(channel, text_size)
    data = _exactly(channel, data_size)
    return None if text is None or data is None else (json.loads(text), data)


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def end_all(kept: Kept) -> None:
    """Kill and reap every process below this one, however it hid."""
    while True:
        if kept.alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for pid in usage.descendants():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0 if kept.alone else os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _reap_orphans(but: int) -> None:
    """Reap what ended, except the command itself: in an hours-long command the dead would use up the process limit."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return


@dataclass
class _Stream:
    """One of the command's outputs, and what of it was kept."""

    fd: int
    kept: bytearray = field(default_factory=bytearray)
    open: bool = True


class _Command:
    """One command from start to the death of its last process."""

    def __init__(self, kept: Kept, channel: socket.socket, request: dict[str, Any]) -> None:
        self.kept, self.channel, self.request = kept, channel, request
        self.room: int = request["output"]
        self.dropped = 0
        self.limit: str | None = None
        self.disk_look = 0.0
        self.pid = 0
        self.ended_before = usage.ended_for_memory(kept)

    def run(self, stdin: bytes) -> tuple[dict[str, Any], bytes]:
        """Reply header, and stdout followed by stderr."""
        began = time.monotonic()
        reads, writes = zip(os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC), strict=True)
        streams = [_Stream(fd) for fd in reads]
        try:
            for fd in reads:
                os.set_blocking(fd, False)
            try:
                process = self._start(stdin, *writes)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                return self._not_started(error, began)
            finally:
                for fd in writes:
                    os.close(fd)
            code = self._watch(process, streams, began + self.request["timeout"])
        finally:
            for fd in reads:
                os.close(fd)
        out, err = (bytes(stream.kept) for stream in streams)
        return self._reply(code, began, len(out)), out + err

    def _reply(self, code: int | None, began: float, out: int) -> dict[str, Any]:
        return {
            "exit": code,
            "limit": self.limit,
            "seconds": time.monotonic() - began,
            "dropped": self.dropped,
            "out": out,
        }

    def _not_started(self, error: Exception, began: float) -> tuple[dict[str, Any], bytes]:
        """A command that cannot be executed is the agent's mistake, told as a shell tells it."""
        end_all(self.kept)
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        text = f"{self.request['argv'][0]}: {getattr(error, 'strerror', None) or error}\n".encode()[: self.room]
        return self._reply(127 if missing else 126, began, 0), text

    def _start(self, stdin: bytes, out: int, err: int) -> subprocess.Popen[bytes]:
        source = os.memfd_create("stdin") if stdin else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stdin:
                with os.fdopen(os.dup(source), "wb") as file:
                    file.write(stdin)
                os.lseek(source, 0, os.SEEK_SET)
            process = subprocess.Popen(
                self.request["argv"],
                stdin=source,
                stdout=out,
                stderr=err,
                env=self.request["env"],
                cwd=os.path.join(self.kept.work, self.request["cwd"]),
                start_new_session=True,
                preexec_fn=self.kept.before_exec,
            )
        finally:
            os.close(source)
        cpu = self.kept.setup.cpu_s
        # Over already, or by now another user's: the wall limit still holds.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu, cpu + 1))
        # Should the host run out of memory, the command goes first, not the keeper.
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/oom_score_adj", "w") as file:
            file.write("1000")
        return process

    def _watch(self, process: subprocess.Popen[bytes], streams: list[_Stream], deadline: float) -> int | None:
        poller = select.poll()
        self.pid = process.pid
        ended = os.pidfd_open(self.pid)
        by_fd = {stream.fd: stream for stream in streams}
        for fd in (*by_fd, ended, self.channel.fileno()):
            poller.register(fd, select.POLLIN)
        self.disk_look = time.monotonic() + _LOOK_S
        try:
            done = False
            while not done and self.limit is None:
                now = time.monotonic()
                ready = poller.poll(max(0.0, min(deadline, self.disk_look) - now) * 1000)
                for fd, _ in ready:
                    if fd == ended:
                        done = True
                    elif fd == self.channel.fileno():
                        self.limit = "cancelled"
                    else:
                        self._read(by_fd[fd])
                        if not by_fd[fd].open:
                            poller.unregister(fd)
                self._check(deadline, done)
        finally:
            os.close(ended)
        if self.limit is not None:
            process.kill()
        code = process.wait()
        end_all(self.kept)
        usage.remove_segments(self.kept)
        if self.limit is None and usage.ended_for_memory(self.kept) > self.ended_before:
            self.limit = "memory"
        for stream in streams:
            while stream.open and self._read(stream):
                pass
        return self._exit_code(code)

    def _read(self, stream: _Stream) -> bool:
        """Take what is there; False at the end of the stream or when nothing is left for now."""
        try:
            data = os.read(stream.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            stream.open = False
            return False
        keep = data[: self.room]
        stream.kept += keep
        self.room -= len(keep)
        self.dropped += len(data) - len(keep)
        return True

    def _check(self, deadline: float, done: bool) -> None:
        now = time.monotonic()
        if done or self.limit is not None:
            return
        if now >= deadline:
            self.limit = "wall"
        elif self.dropped > _FLOOD_BYTES:
            self.limit = "output"
        elif now >= self.disk_look:
            self.limit = self._over()
            _reap_orphans(self.pid)
            self.disk_look = now + max(_LOOK_S, 10 * (time.monotonic() - now))

    def _over(self) -> str | None:
        """`disk` or `memory`, if the workspace is over it: memory by the kernel's count where there is a group."""
        kept, setup = self.kept, self.kept.setup
        pids = usage.processes(kept)
        disk, memory = usage.nameless(kept, pids)
        if disk > setup.disk_bytes or disk + usage.disk_use(kept.watch, setup.disk_bytes - disk) > setup.disk_bytes:
            return "disk"
        if kept.events is not None:
            over = usage.ended_for_memory(kept) > self.ended_before
        else:
            over = usage.memory_use(kept, pids, memory) > setup.total_bytes
        return "memory" if over else None

    def _exit_code(self, code: int) -> int | None:
        if self.limit is not None:
            return None
        if code == -signal.SIGXCPU:
            self.limit = "cpu"
            return None
        return code if code >= 0 else 128 - code
