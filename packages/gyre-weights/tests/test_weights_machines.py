"""A second machine, as far as the kernel can make one: other network, other shared memory, the same run directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gyre_weights import Publisher, open_version
from gyre_weights.handover import Holder, Receiver, whole
from gyre_weights.shm import SHM
from weights_models import changed, weights

HERE, THERE = (f"198.18.{os.getpid() % 256}.{i}" for i in (1, 2))  # of the range for tests between networks
MEANS = all(map(shutil.which, ("ip", "unshare", "mount"))) and os.getuid() == 0
pytestmark = pytest.mark.skipif(not MEANS, reason="needs root, iproute2 and util-linux to make a second machine")

SATELLITE = """
import json, sys
from pathlib import Path
import numpy as np
from gyre_weights import open_version
from gyre_weights.handover import Endpoint, hand_over, nearest

location, holder, core, into = sys.argv[1:]
seen = Path(location).is_dir()
found = nearest(location, 1, holder, into)
found.verify_all()
lanes = [
    hand_over(Endpoint.load(Path(core)), f"c{i}", 1, {"a": np.arange(9, dtype=np.float32)}, lane=lane).lanes[0]
    for i, lane in enumerate((None, "socket", "group"))
]
print(json.dumps([seen, str(found.folder), open_version(Path(into) / "v1").digest, lanes]))
"""


class Machine:
    """A shell in namespaces of its own, that becomes the satellite when it is told to go."""

    def __init__(self, network: bool) -> None:
        self.network, self.link, self.peer = network, f"gyre{os.getpid()}", f"gyre{os.getpid()}p"
        steps = ["mount -t tmpfs none /dev/shm", "echo ready", "read go"]
        if network:
            steps += ["ip link set lo up", f"ip addr add {THERE}/30 dev {self.peer}", f"ip link set {self.peer} up"]
        command = ["unshare", "--mount", *(["--net"] if network else []), "sh", "-ec", "; ".join([*steps, 'exec "$@"'])]
        self.command = [*command, "satellite"]

    def run(self, *satellite: str) -> str:
        """What the satellite printed."""
        with subprocess.Popen(
            [*self.command, *satellite],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as shell:
            try:
                assert shell.stdout is not None
                if shell.stdout.readline() != "ready\n":
                    pytest.skip(f"the kernel gives no namespaces: {shell.communicate()[1]}")
                if self.network:
                    ip("link", "set", self.peer, "netns", str(shell.pid))
                out, errors = shell.communicate("go\n", timeout=120)
            finally:
                shell.kill()
        assert shell.returncode == 0, errors
        return out


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the kernel gives no link between networks: ip {' '.join(words)}: {done.stderr}")


@pytest.fixture(params=["another machine", "a container with this network"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = Machine(request.param == "another machine")
    if not made.network:
        yield made
        return
    ip("link", "add", made.link, "type", "veth", "peer", "name", made.peer)
    try:
        ip("addr", "add", f"{HERE}/30", "dev", made.link)
        ip("link", "set", made.link, "up")
        yield made
    finally:  # goes with its other end when the satellite's network has ended already
        subprocess.run(["ip", "link", "del", made.link], capture_output=True, check=False)


def test_a_satellite_elsewhere_gets_weights_and_hands_over(tmp_path: Path, machine: Machine) -> None:
    host = HERE if machine.network else "127.0.0.1"
    publisher = Publisher("shm", tmp_path / "run")
    holder = Holder(tmp_path / "run", host=host)
    core = Receiver(whole({"a": ("F32", (9,))}), host=host)
    try:
        for version in range(2):
            made = publisher.publish(version, lambda seed=version: changed(weights(), 0.1, seed))
        assert SHM in (tmp_path / "run" / "v1").resolve().parents
        core.open_step(1)
        holder.start().save(tmp_path / "holder.json")
        core.start().save(tmp_path / "core.json")
        files = [str(tmp_path / name) for name in ("run/v1", "holder.json", "core.json")]
        out = machine.run(sys.executable, "-c", SATELLITE, *files, "/dev/shm/here")
        seen, folder, digest, lanes = json.loads(out.splitlines()[-1])
        assert not seen, "the link into this machine's memory leads nowhere there"
        assert (folder, digest) == ("/dev/shm/here/v1", made.digest)
        assert not Path("/dev/shm/here").exists(), "it has a memory of its own"
        assert holder.given == {1: 1}
        # a descriptor travels by the socket itself: who shares the network needs to share no file system
        assert lanes == ["socket" if machine.network else "memory", "socket", "group"]
        for name in ("c0", "c1", "c2"):
            assert np.array_equal(core.take(name).tensors()["a"].numpy(), np.arange(9, dtype=np.float32))
        assert open_version(tmp_path / "run" / "v1").digest == digest
    finally:
        core.close()
        holder.close()
        publisher.close()
