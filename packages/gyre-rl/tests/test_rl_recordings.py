"""`gyre check`, `tree` and `replay` on what a run left."""

from __future__ import annotations

import json

import pytest
from gyre_core import ConfigError
from gyre_rl.cli.console import Console
from gyre_rl.cli.recordings import is_recording, replay_scheduler, tito
from gyre_rl.run.directory import RunDirectory
from gyre_sched import CellId, Role, SchedConfig
from gyre_sched import events as sched
from gyre_sched.log import EventLog


@pytest.fixture
def store(tmp_path):
    from gyre_tito import Store

    Store.open(tmp_path / "trajectories.db", writable=True).close()
    return tmp_path


def test_what_is_a_recording_and_what_a_runs_file(store, tmp_path):
    assert is_recording(store)
    assert is_recording(store / "trajectories.db")
    (store / "rollouts.jsonl").write_text("")
    assert is_recording(store / "rollouts.jsonl")
    (store / "gyre.toml").write_text("")
    assert not is_recording(store)
    assert not is_recording(store / "gyre.toml")
    assert not is_recording(store / "nothing")


def test_check_and_tree_reach_the_store(store, capsys):
    tito("check", [str(store)], Console(json=True))
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    tito("tree", [str(store)], Console(json=True))
    assert json.loads(capsys.readouterr().out) == []
    with pytest.raises(SystemExit) as caught:
        tito("tree", [str(store / "gone")], Console())
    assert caught.value.code == 2
    capsys.readouterr()


def test_a_schedulers_log_is_replayed_and_its_stories_told(tmp_path, capsys):
    config = SchedConfig()
    log = EventLog(RunDirectory(tmp_path).scheduler_log, config)
    log.append(sched.CellJoined(1.0, CellId("cell-0", 1), Role.TRAIN, 8, 4096, True))
    log.close()

    replay_scheduler(tmp_path, "", Console(json=True))
    assert json.loads(capsys.readouterr().out)["events"] == {"CellJoined": 1}
    replay_scheduler(tmp_path, "cell-0", Console())
    assert "cell-0#1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no scheduler\.jsonl"):
        replay_scheduler(tmp_path / "none", "", Console())
