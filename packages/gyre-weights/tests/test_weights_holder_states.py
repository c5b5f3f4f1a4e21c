"""Whatever is published, set back, dropped, lost and fetched in whatever order: bytes of the trainer, or an error."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from gyre_weights import Publisher, WeightsError, drop_old, open_version, versions_in
from gyre_weights.handover import Holder
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from weights_models import nearest

Tensors = dict[str, np.ndarray]
KEEP = st.integers(1, 4)
PICK = st.integers(0, 2)


def equal(found: Tensors, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def newest(folder: Path, pick: int) -> Path:
    """The newest version of a folder, or one a little older."""
    held = versions_in(folder)
    return held[sorted(held)[-1 - min(pick, len(held) - 1)]]


class TwoMachines(RuleBasedStateMachine):
    """A trainer's folder with a holder, and a newcomer's folder."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.there, self.here = self.root / "there", self.root / "here"
        self.holder = Holder(self.there, idle_s=200.0)
        self.endpoint = self.holder.start()
        self.publisher = Publisher("delta", self.there, keep=4, full_every=3, worth=2.0)
        self.random = np.random.default_rng(0)
        self.tensors: Tensors = {"a": np.zeros(300, np.float32), "b": np.zeros((4, 5), np.float64)}
        self.published: dict[int, tuple[str, Tensors]] = {}
        """What each number was last: digest and contents."""

    def teardown(self) -> None:
        self.holder.close()
        shutil.rmtree(self.root)

    @rule(back=st.integers(0, 3))
    def publish(self, back: int) -> None:
        """The next version, or one that was before: then the run was set back."""
        version = max(0, max(versions_in(self.there), default=-1) + 1 - back)
        self.tensors["a"][self.random.integers(0, 300, 3)] += 1
        made = self.publisher.publish(version, lambda: self.tensors)
        self.published[version] = (made.digest, {name: array.copy() for name, array in self.tensors.items()})

    @rule(keep=KEEP, here=st.booleans())
    def drop(self, keep: int, here: bool) -> None:
        drop_old(self.here if here else self.there, keep)

    @precondition(lambda self: versions_in(self.there) and versions_in(self.here))
    @rule(pick=PICK, here=st.booleans())
    def lose(self, pick: int, here: bool) -> None:
        """A version goes whatever rests on it."""
        shutil.rmtree(newest(self.here if here else self.there, pick))

    @precondition(lambda self: versions_in(self.here))
    @rule(pick=PICK)
    def cut(self, pick: int) -> None:
        """A file here ends early, and a killed process left half a version."""
        folder = newest(self.here, pick)
        for shard in folder.glob("*.safetensors"):
            shard.write_bytes(shard.read_bytes()[:-1])
        folder.with_name(f".{folder.name}.0123").mkdir(exist_ok=True)

    @precondition(lambda self: self.published)
    @rule()
    def fetch_newest(self) -> None:
        self.check(0, 3, told=False)

    @precondition(lambda self: self.published)
    @rule(pick=PICK, keep=KEEP, told=st.booleans())
    def fetch(self, pick: int, keep: int, told: bool) -> None:
        self.check(pick, keep, told=told)

    def check(self, pick: int, keep: int, *, told: bool) -> None:
        """One fetch: what comes is what was published last under this number."""
        version = sorted(self.published)[-1 - min(pick, len(self.published) - 1)]
        digest, tensors = self.published[version]
        try:
            open_version(self.there / f"v{version}").hold()
            whole = True
        except WeightsError:
            whole = False
        try:
            found = nearest("/nowhere", version, self.endpoint, self.here, digest=digest if told else None, keep=keep)
        except WeightsError:
            assert not whole, "the holder has it whole"
            return
        assert whole or told, "nobody says that this is the version"
        named = open_version(self.here / f"v{version}")
        for opened in (found, named):
            assert (opened.version, opened.digest) == (version, digest)
            assert equal({name: opened[name].numpy() for name in opened}, tensors)


TestTwoMachines = TwoMachines.TestCase
TestTwoMachines.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
