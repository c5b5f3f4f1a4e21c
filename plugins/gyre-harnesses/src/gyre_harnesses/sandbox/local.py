"""Sandbox `local`: each workspace a folder with a keeper process that runs its commands, on this host.

Invariant: paths that lead out of a workspace are refused; when `run` returned, no process of it is left; closing a
workspace ends its keeper and removes its folder. What the kernel did not grant of the isolation asked for is in
`LocalSandbox.isolation`, and an isolation asked for by name is granted or refused, never weakened.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_core import CapabilityError, ComponentContext, ConfigError, ExecRequest, ExecResult, InfrastructureError

from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox import cgroups, folders, paths, snapshots
from gyre_harnesses.sandbox.folders import Folder
from gyre_harnesses.sandbox.keeper import trees
from gyre_harnesses.sandbox.spawner import Channel, Spawner

log = logging.getLogger("gyre.sandbox")

_PARTS = ("work", "home", "tmp", "root")
_UIDS = 10_000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Isolation:
    """What workspaces really get."""

    level: str
    """`namespaces`, `landlock` or `none`."""
    problems: tuple[str, ...] = ()
    """What is open that should not be."""
    place: cgroups.Place | str = "not looked for"
    """Where workspaces get control groups; or why they get none."""

    @property
    def limits(self) -> str:
        """By what memory and processes are limited, in words."""
        if isinstance(self.place, str):
            return f"rlimits and looks ({self.place})"
        return f"control groups (version {self.place.version})"


class LocalWorkspace:
    """One execution's folder and keeper. Commands run one at a time."""

    def __init__(
        self,
        folder: Folder,
        channel: Channel,
        level: str,
        seen_at: Mapping[str, str],
        env: Mapping[str, str],
        *,
        group: cgroups.Group | None,
        disk_bytes: int,
        keep: bool,
        closed: Callable[[LocalWorkspace], None],
    ) -> None:
        self._folder, self._channel, self._keep, self._tell_closed = folder, channel, keep, closed
        self._group, self._disk_bytes = group, disk_bytes
        self._closed = False
        self._level = level
        self.inner_path = seen_at["work"]
        """The workspace as its commands see it."""
        self._env = {
            "PATH": _PATH,
            "HOME": seen_at["home"],
            "TMPDIR": seen_at["tmp"],
            "LANG": "C.UTF-8",
            "USER": "agent",
            **env,
        }

    @property
    def path(self) -> str:
        """Its folder on this host."""
        return os.path.join(self._folder.path, "work")

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run a command to its end or limit; see `gyre_core.Workspace.run`."""
        header = {
            "op": "run",
            "argv": list(request.argv),
            "env": {**self._env, **request.env},
            "cwd": self._inside(request.cwd),
            "timeout": request.timeout_s,
            "output": request.output_bytes,
        }
        reply, output = await self._channel.request(header, request.stdin, request.timeout_s)
        out = reply["out"]
        return ExecResult(reply["exit"], output[:out], output[out:], reply["seconds"], reply["limit"], reply["dropped"])

    async def listen(self) -> socket.socket:
        """A listening socket on the loopback that commands see: the one way out that a caller may open for them."""
        if self._level == "landlock":
            raise CapabilityError(
                "opening a way from a workspace to this process",
                got="isolation 'landlock', which refuses TCP",
                expected="isolation 'namespaces' or 'none'",
                fix="Set the sandbox's option isolation.",
            )
        return await self._channel.listener()

    def _inside(self, cwd: str) -> str:
        """`cwd` is ours to check for where it leads; the rest is the isolation's."""
        os.close(paths.open_beneath(self.path, cwd, os.O_RDONLY | os.O_DIRECTORY))
        return cwd

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes of a regular file inside."""
        return paths.read_beneath(self.path, path, limit)

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file inside, with its parents."""
        paths.write_beneath(self.path, path, data)

    async def list(self, path: str = ".") -> Sequence[str]:
        """Relative paths of all regular files below `path`, sorted."""
        return paths.list_beneath(self.path, path)

    async def snapshot(self, location: str) -> None:
        """The folder at rest, as a tar file at `location`."""
        await asyncio.to_thread(snapshots.save, self.path, location, self._disk_bytes)

    async def close(self) -> None:
        """End the keeper with all it runs and delete the folder."""
        if self._closed:
            return
        self._closed = True
        self._tell_closed(self)
        self._channel.close()
        try:
            if self._group is not None:
                await asyncio.to_thread(self._group.end)
        finally:
            await asyncio.to_thread(self._folder.let_go if self._keep else self._folder.free)


class LocalSandbox:
    """Makes local workspaces. `Class(options, context)` as registrations require."""

    def __init__(self, options: LocalOptions | None, context: ComponentContext) -> None:
        self.options = options or LocalOptions()
        self._base = self.options.root or os.path.join(context.run_dir, "workspaces")
        self._spawner = Spawner()
        self._workspaces: set[LocalWorkspace] = set()
        self._made = 0
        self._groups = itertools.count()
        self._isolation: Isolation | None = None
        self._probe = asyncio.Lock()

    async def isolation(self) -> Isolation:
        """What the kernel grants of the isolation asked for, tried out once with a throwaway workspace."""
        async with self._probe:
            if self._isolation is None:
                self._isolation = await self._find_isolation()
            return self._isolation

    async def examine(self) -> Sequence[tuple[str, str, str]]:
        """For `gyre doctor`: what workspaces get on this host, each as (what, found, what is missing of the best)."""
        found = await self.isolation()
        looked = "" if isinstance(found.place, cgroups.Place) else "memory is looked at four times a second"
        return (("isolation", found.level, "; ".join(found.problems)), ("limits", found.limits, looked))

    async def _find_isolation(self) -> Isolation:
        await asyncio.to_thread(folders.clear, self._base)
        asked, place = self.options.isolation, await asyncio.to_thread(cgroups.find, self.options.cgroup)
        if isinstance(place, str) and self.options.cgroup not in ("auto", "none"):
            raise _no_group(f"no control group can be made in {self.options.cgroup}: {place}")
        refusals: list[str] = []
        for level in ("namespaces", "landlock", "none") if asked == "auto" else (asked,):
            hello = await self._probed(level, place)
            if "error" in hello and isinstance(place, cgroups.Place):
                alone = await self._probed(level, "not joined")
                if "error" not in alone:
                    place = self._unjoined(place, hello["error"])
                hello = alone
            if "error" not in hello:
                return Isolation(level, (*refusals, *hello["problems"]), place)
            refusals.append(f"{level}: {hello['error']}")
            if asked != "auto" or self.options.require:
                break
        raise ConfigError(
            "starting the sandbox 'local'",
            got="; ".join(refusals),
            expected=f"isolation {asked!r}" + (" at the level 'namespaces'" if self.options.require else ""),
            fix="Allow user namespaces on this host, or choose a lower isolation level.",
        )

    async def _probed(self, level: str, place: cgroups.Place | str) -> Mapping[str, Any]:
        """What the keeper of a throwaway workspace says, in a group where there is a place for one."""
        folder, group = self._new_folder(), None
        try:
            group = self._group(place)
            channel, hello = await self._spawner.keeper("probe", self._setup(folder.path, level, group))
            channel.close()
        finally:
            if group is not None:
                await _end(group)
            folder.free()
        return hello

    def _unjoined(self, place: cgroups.Place, why: str) -> str:
        """Why there are no groups though they can be made; ConfigError when the folder was asked for by name."""
        if self.options.cgroup != "auto":
            raise _no_group(f"no process can join a control group in {self.options.cgroup}: {why}")
        return f"version {place.version}: {why} as a process joins a group in {place.folders[0]}"

    def _new_folder(self) -> Folder:
        folder = None
        try:
            folder = folders.make(self._base, keep=self.options.keep)
            self._made += 1
            for part in _PARTS:
                os.mkdir(os.path.join(folder.path, part), 0o755)
            if os.geteuid() == 0:
                for path in (folder.path, *(os.path.join(folder.path, part) for part in _PARTS)):
                    os.chown(path, self._uid(), self._uid())
            return folder
        except OSError as error:
            if folder is not None:
                folder.free()
            raise InfrastructureError(
                f"making a workspace folder in {self._base}",
                got=str(error),
                expected="room and the right to write there",
            ) from error

    def _uid(self) -> int:
        return self.options.uid_base + self._made % _UIDS if os.geteuid() == 0 else os.geteuid()

    def _group(self, place: cgroups.Place | str) -> cgroups.Group | None:
        """A group for a workspace, where they can be made."""
        if not isinstance(place, cgroups.Place):
            return None
        try:
            return cgroups.make(
                place, f"{id(self):x}-{next(self._groups)}", self.options.total_memory_mb << 20, self.options.processes
            )
        except OSError as error:
            raise InfrastructureError(
                "making a control group for a workspace", got=str(error), expected=f"room in {place.folders[0]}"
            ) from error

    def _setup(self, folder: str, level: str, group: cgroups.Group | None) -> dict[str, object]:
        options = self.options
        mb = 1 << 20
        return {
            "folder": os.path.abspath(folder),
            "isolation": level,
            "uid": os.stat(folder).st_uid,
            "network": options.network,
            "visible": list(options.visible),
            "memory_bytes": options.memory_mb * mb,
            "total_bytes": options.total_memory_mb * mb,
            "file_bytes": options.file_mb * mb,
            "disk_bytes": options.disk_mb * mb,
            "processes": options.processes,
            "cpu_s": options.cpu_s,
            "open_files": options.open_files,
            "groups": [] if group is None else list(group.folders),
            "events": "" if group is None else group.events,
        }

    async def _workspace(self, name: str, folder: Folder) -> LocalWorkspace:
        isolation = await self.isolation()
        level, group = isolation.level, self._group(isolation.place)
        try:
            channel, hello = await self._spawner.keeper(name, self._setup(folder.path, level, group))
            if "error" in hello:
                raise InfrastructureError(
                    f"making workspace {name!r}", got=hello["error"], expected=f"isolation {level!r}"
                )
        except BaseException:
            if group is not None:
                await _end(group)
            raise
        workspace = LocalWorkspace(
            folder,
            channel,
            level,
            hello["seen"],
            self.options.env,
            group=group,
            disk_bytes=self.options.disk_mb << 20,
            keep=self.options.keep,
            closed=self._workspaces.discard,
        )
        self._workspaces.add(workspace)
        return workspace

    async def create(self, name: str, files: Mapping[str, bytes]) -> LocalWorkspace:
        """A fresh workspace with these files."""
        folder = self._new_folder()
        try:
            for path, data in files.items():
                paths.write_beneath(os.path.join(folder.path, "work"), path, data)
            return await self._workspace(name, folder)
        except OSError as error:
            folder.free()
            if error.errno in (errno.EPERM, errno.EACCES):
                raise ConfigError(f"filling workspace {name!r}", got=str(error), expected="paths inside it") from error
            raise InfrastructureError(f"filling workspace {name!r}", got=str(error), expected="room on disk") from error
        except BaseException:
            folder.free()
            raise

    async def restore(self, name: str, location: str) -> LocalWorkspace:
        """A workspace as `LocalWorkspace.snapshot` left it."""
        folder = self._new_folder()
        work = os.path.join(folder.path, "work")
        try:
            await asyncio.to_thread(snapshots.load, location, work)
            _give(work, os.stat(folder.path).st_uid)
            return await self._workspace(name, folder)
        except BaseException:
            folder.free()
            raise

    async def close(self) -> None:
        """End all workspaces and the spawner; then raise the first error there was."""
        first: InfrastructureError | None = None
        for workspace in list(self._workspaces):
            try:
                await workspace.close()
            except InfrastructureError as error:
                first = first or error
        self._workspaces.clear()
        self._spawner.close()
        if first is not None:
            raise first


async def _end(group: cgroups.Group) -> None:
    """End the group of what did not become a workspace: that it stays is told, and hides no error that matters more."""
    try:
        await asyncio.to_thread(group.end)
    except InfrastructureError as error:
        log.warning("%s", error)


def _no_group(got: str) -> ConfigError:
    return ConfigError(
        "starting the sandbox 'local'",
        got=got,
        expected="a delegated folder of version 2 without processes",
        fix="Set the sandbox's option cgroup to auto, or delegate the folder to this user.",
    )


def _give(folder: str, uid: int) -> None:
    """Make `uid` the owner of all that is in `folder`; a no-op unless we are root."""
    if os.geteuid() == 0:
        start = os.open(folder, trees.FOLDER)
        try:
            os.fchown(start, uid, uid)
            for spot, name, _ in trees.walk(start):
                os.chown(name, uid, uid, dir_fd=spot.fd, follow_symlinks=False)
        finally:
            os.close(start)
