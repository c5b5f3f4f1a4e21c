"""CPU that a short command costs: in the sandbox `local` at each isolation, and as a bare asyncio subprocess.

    python benchmarks/sandbox_command.py [--json] [--commands 200]

CPU is user plus system time of this process and all it started, so that other work on the machine does not count. The
last line is one JSON object; milliseconds of CPU for one command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from pathlib import Path

from gyre_core import ComponentContext, ConfigError, ExecRequest
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox

COMMANDS = {"nothing": "true > out", "sort": "sort in > out"}


def ticks(pid: int) -> int:
    """User and system time of a process and its reaped children, in clock ticks; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:15])


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    found, ahead = [], [pid]
    while ahead:
        found.append(ahead.pop())
        try:
            ahead += map(int, Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text().split())
        except OSError:
            continue
    return found


def cpu_ms() -> float:
    """Of this process and its descendants, milliseconds."""
    return sum(map(ticks, family(os.getpid()))) / os.sysconf("SC_CLK_TCK") * 1000


async def bare(command: str, folder: str, count: int) -> float:
    before = cpu_ms()
    for _ in range(count):
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=folder, stdout=-1, stderr=-1, stdin=-3, start_new_session=True
        )
        await process.communicate()
    return (cpu_ms() - before) / count


async def sandboxed(level: str, folder: str, count: int) -> dict[str, float]:
    sandbox = LocalSandbox(LocalOptions(isolation=level), ComponentContext(folder, "benchmark"))
    try:
        workspace = await sandbox.create("w", {"in": b"3\n1\n2\n"})
        found = {}
        for name, command in COMMANDS.items():
            before = cpu_ms()
            for _ in range(count):
                await workspace.run(ExecRequest(["bash", "-c", command], 30.0, 10_000))
            found[name] = (cpu_ms() - before) / count
        before = cpu_ms()
        for _ in range(count // 4):
            await (await sandbox.create("one", {"in": b"1\n"})).close()
        found["create and close"] = (cpu_ms() - before) / (count // 4)
        return found
    finally:
        await sandbox.close()


async def measure(count: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "in").write_text("3\n1\n2\n")
        results = {"asyncio subprocess": {name: await bare(line, folder, count) for name, line in COMMANDS.items()}}
        for level in ("namespaces", "landlock", "none"):
            try:
                results[f"local, {level}"] = await sandboxed(level, folder, count)
            except ConfigError as error:
                print(f"{level}: {error}")
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--commands", type=int, default=200)
    options = parser.parse_args()
    results = asyncio.run(measure(options.commands))
    if not options.json:
        for name, row in results.items():
            print(f"{name:22}", "  ".join(f"{what} {ms:6.2f} ms" for what, ms in row.items()))
    hardware = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"
    print(json.dumps({"benchmark": "sandbox_command", "unit": "ms of CPU", "hardware": hardware, "results": results}))


if __name__ == "__main__":
    main()
