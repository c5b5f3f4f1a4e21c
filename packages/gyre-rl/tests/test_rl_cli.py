"""The `gyre` command as a person and a program meet it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gyre_core import ConfigError, InfrastructureError, PluginError
from gyre_rl.cli.console import Console, reported
from gyre_rl.cli.errors import explain, render
from gyre_rl.cli.preflight import chat_problems, preflight
from gyre_rl.cli.rundirs import place_run, reopen_run
from gyre_rl.cli.signals import Stopped, until_stopped
from gyre_rl.config import ModelConfig, PluginChoice, ProxyConfig, RunConfig, RunConfigError, load
from gyre_rl.config.schema import CellsConfig, NetworkConfig
from gyre_rl.procs.machines import MachinesOptions

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
CONFIG = 'name = "small"\ntasks = "files"\n[model]\npath = "policy"\n'


def gyre(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-c", "from gyre_rl.cli import main; main()", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def model(tmp_path):
    policy = tmp_path / "policy"
    policy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (policy / name).write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / "policy" / name, policy)
    (tmp_path / "gyre.toml").write_text(CONFIG)
    return tmp_path


def config_in(folder, **changes):
    return RunConfig("small", ModelConfig("policy"), PluginChoice("files"), base_dir=str(folder), **changes)


def test_check_says_what_the_run_would_be(model):
    done = gyre("check", ".", "--json", "--set", "seed=3", cwd=model)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["ok"] is True
    assert "seed = 3" in answer["config"]
    text = gyre("check", ".", cwd=model).stdout
    assert text.rstrip().endswith("Good on this machine.")
    assert not (model / "runs").exists()


def test_a_typo_ends_with_status_2_a_place_and_a_suggestion(model):
    (model / "gyre.toml").write_text(CONFIG + "[rollout]\ngroup_sise = 4\n")
    done = gyre("run", ".", "--json", cwd=model)
    assert done.returncode == 2
    assert "gyre.toml:6: rollout.group_sise: unknown key; did you mean 'group_size'?" in done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"]["type"] == "RunConfigError"


def test_a_missing_plugin_is_named_with_what_is_installed(model):
    done = gyre("run", ".", "--set", "engine=vllmm", cwd=model)
    assert done.returncode == 2
    assert "looking for the engine 'vllmm'" in done.stderr
    assert "local" in done.stderr
    assert done.stdout == ""


def test_a_port_in_use_is_said_before_anything_starts(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = gyre("run", ".", "--set", f"proxy.port={port}", cwd=model)
    assert done.returncode == 2
    assert f"127.0.0.1:{port} (Address already in use)" in done.stderr
    assert "--set proxy.port=0" in done.stderr
    assert not (model / "runs").exists()


def test_usage_errors_have_status_2_and_debug_shows_the_traceback(model):
    assert gyre("run", cwd=model).returncode == 2
    assert gyre("walk", cwd=model).returncode == 2
    assert "Traceback" in gyre("run", "nowhere", "--debug", cwd=model).stderr


def test_the_machine_is_checked_as_a_whole(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_in(tmp_path, proxy=ProxyConfig(port=taken.getsockname()[1]))
        with pytest.raises(RunConfigError) as caught:
            preflight(config, tmp_path / "file" / "run")
    assert [p.path for p in caught.value.problems] == ["model.path", "proxy.port"]
    (tmp_path / "policy").mkdir()
    with pytest.raises(RunConfigError) as caught:
        preflight(config_in(tmp_path), tmp_path / "run")
    texts = " ".join(str(p) for p in caught.value.problems)
    assert "config.json" in texts
    assert "safetensors" in texts
    assert "tokenizer" in texts


@pytest.mark.parametrize("elsewhere", [(), ("--elsewhere",)], ids=["here", "elsewhere"])
def test_a_family_that_is_none_is_said_with_those_there_are(model, elsewhere):
    done = gyre("check", ".", "--set", "model.family=qwen33", *elsewhere, cwd=model)
    assert done.returncode == 2
    assert "model.family: the model cannot chat: choosing chat format 'qwen33'" in done.stderr
    assert "'qwen3', " in done.stderr


def told_of_chat(model, **changes):
    """The keys of the problems with the chat format, and their text."""
    found = list(chat_problems(replace(config_in(model), model=ModelConfig("policy", **changes))))
    return [problem.path for problem in found], " ".join(map(str, found))


def test_a_model_that_cannot_chat_is_found_before_the_run_starts(model):
    assert told_of_chat(model) == told_of_chat(model, family="qwen3") == ([], "")
    keys, text = told_of_chat(model, family="llama-3")
    assert keys == ["model.family"]
    assert "<|begin_of_text|>" in text
    template = model / "policy" / "chat_template.jinja"
    for broken in ("{% for %}", "{{ raise_exception('never') }}"):
        template.write_text(broken)
        assert told_of_chat(model)[0] == ["model.path"]
    assert told_of_chat(model, family="qwen3")[0] == [], "this family brings its own"
    template.unlink()
    keys, text = told_of_chat(model)
    assert keys == ["model.path"]
    assert "chat_template.jinja" in text
    (model / "policy" / "tokenizer.json").write_text("{}")
    assert told_of_chat(model, family="qwen3")[0] == ["model.family"]
    assert told_of_chat(model, tokenizer="nowhere", family="qwen3")[0] == [], (
        "not at hand, so its name alone is looked at"
    )


def test_a_host_that_is_not_ours_is_a_problem(model):
    with pytest.raises(RunConfigError, match=r"proxy\.host: got .203\.0\.113\.1"):
        preflight(config_in(model, proxy=ProxyConfig(host="203.0.113.1")), model / "run")


def test_an_address_of_another_machine_and_a_launcher_that_cannot_start(model):
    with pytest.raises(RunConfigError) as caught:
        preflight(config_in(model, network=NetworkConfig("203.0.113.1")), model / "run")
    assert [p.path for p in caught.value.problems] == ["network.address"]
    machines = PluginChoice("machines", MachinesOptions(hosts=("node-1",)))
    with pytest.raises(RunConfigError, match=r"launcher: .*\[network\] address"):
        preflight(config_in(model, launcher=machines), model / "run")
    one = PluginChoice("machines", MachinesOptions(hosts=("localhost",)))
    with pytest.raises(RunConfigError, match=r"launcher: placing cell 1: .*lower cells\.count"):
        preflight(config_in(model, launcher=one, cells=CellsConfig(count=3)), model / "run")


def test_run_directories_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = place_run(config_in(tmp_path))
    assert first.dir == str(tmp_path / "runs" / "small")
    Path(first.dir).mkdir(parents=True)
    assert place_run(config_in(tmp_path)).dir == str(tmp_path / "runs" / "small-2")
    mine = tmp_path / "mine"
    assert place_run(config_in(tmp_path, dir="mine")).dir == str(mine)
    mine.mkdir()
    (mine / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="gyre resume mine"):
        place_run(config_in(tmp_path, dir="mine"))


def test_a_run_is_reopened_with_its_own_configuration(model):
    from gyre_rl.cli.training import record

    config = place_run(load(model, ["seed=5", f"dir={model}/out"]))
    record(config)
    again = reopen_run(model / "out", ["steps=99"])
    assert (again.seed, again.steps, again.dir, again.model_dir) == (5, 99, config.dir, config.model_dir)
    with pytest.raises(ConfigError, match=r"a folder without config\.toml"):
        reopen_run(model, [])
    with pytest.raises(ConfigError, match="no such folder"):
        reopen_run(model / "no", [])


def test_a_key_is_neither_shown_nor_saved_and_asked_for_at_a_resume(model, capsys):
    from gyre_rl.cli.checking import check_config
    from gyre_rl.cli.rundirs import require_secrets
    from gyre_rl.cli.training import record

    judge = 'scorers=[{name = "rubric", base_url = "http://127.0.0.1:1/v1", api_key = "k-4711"}]'
    for console in (Console(), Console(json=True)):
        check_config(model, [judge], console, machine=False, show=True)
        shown = capsys.readouterr().out
        assert "http://127.0.0.1:1/v1" in shown
        assert "4711" not in shown
    config = place_run(load(model, [f"dir={model}/out", judge]))
    record(config)
    assert "4711" not in (model / "out" / "config.toml").read_text()
    with pytest.raises(RunConfigError, match=r"scorers\.0\.api_key: a secret that was not saved"):
        require_secrets(reopen_run(model / "out", []))
    require_secrets(reopen_run(model / "out", [judge]))


def test_check_and_run_read_the_tasks_before_anything_starts(model):
    (model / "mine" / "one").mkdir(parents=True)
    (model / "mine" / "one" / "task.toml").write_text(
        'prompt = "p"\nsplit = "train"\n[scorer]\nname = "pytest"\nfolder = "no-suite"\ntargets = ["t"]\ncount = 1\n'
    )
    tasks = ("--set", 'tasks={name = "folder", path = "mine"}')
    for command in ("check", "run"):
        done = gyre(command, ".", *tasks, cwd=model)
        assert done.returncode == 2
        assert "mine/one/task.toml: tasks: reading the scorer options of task 'folder/one'" in done.stderr
        assert "a folder that exists" in done.stderr
    assert not (model / "runs").exists()
    assert gyre("check", "--elsewhere", ".", *tasks, cwd=model).returncode == 0


def test_what_the_system_refuses_is_explained():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/x")
    error = explain(full)
    assert isinstance(error, InfrastructureError)
    assert error.got == "No space left on device (/run/x)"
    assert "gyre resume" in error.fix
    wrapped = RuntimeError("deep")
    wrapped.__cause__ = full
    assert explain(wrapped).got == error.got
    assert explain(ExceptionGroup("many", [ValueError("x"), full])).got == error.got
    assert explain(PluginError("x")).doing == "x"
    assert explain(ValueError("a fault of ours")) is None


def test_errors_have_their_parts_a_line_each():
    text = render(ConfigError("doing it", got="two\nlines", expected="one", fix="Do."))
    assert text.splitlines() == [
        "    error  doing it failed",
        "      got  two",
        "           lines",
        " expected  one",
        "       do  Do.",
    ]


def test_statuses_tell_who_has_to_act(capsys):
    for error, status in [(ConfigError("x"), 2), (PluginError("x"), 2), (InfrastructureError("x"), 1)]:
        with pytest.raises(SystemExit) as caught, reported(Console()):
            raise error
        assert caught.value.code == status
    with pytest.raises(ValueError, match="a fault of ours"), reported(Console()):
        raise ValueError("a fault of ours")
    with pytest.raises(ConfigError), reported(Console(debug=True)):
        raise ConfigError("x")
    capsys.readouterr()


async def test_the_first_signal_stops_in_order():
    ended = []

    async def work():
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            ended.append("in order")

    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
    with pytest.raises(Stopped):
        await until_stopped(work(), lambda: ended.append("asked"))
    assert ended == ["asked", "in order"]
    assert await until_stopped(asyncio.sleep(0, "done"), lambda: None, deadline_s=60) == "done"


async def test_a_deadline_stops_in_order():
    asked = []
    with pytest.raises(Stopped):
        await until_stopped(asyncio.sleep(30), lambda: asked.append(1), deadline_s=0.02)
    assert asked == [1]


def test_the_second_signal_kills(tmp_path):
    program = (
        "import asyncio\n"
        "from gyre_rl.cli.signals import until_stopped\n"
        "async def work():\n"
        "    print('up', flush=True)\n"
        "    try:\n        await asyncio.sleep(600)\n"
        "    finally:\n        print('stopping', flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(until_stopped(work(), lambda: None))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "stopping\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_plugins_speak_json(tmp_path):
    listed = json.loads(gyre("plugins", "--json", cwd=tmp_path).stdout)
    assert ("launcher", "local") in [(c["kind"], c["name"]) for c in listed["components"]]


def test_the_doctor_finds_and_advises(monkeypatch, capsys):
    from gyre_rl.cli import doctor

    looks = tuple(look for look in doctor.LOOKS if look is not doctor.accelerators)
    monkeypatch.setattr(doctor, "LOOKS", looks)
    doctor.examine(Console(json=True))
    found = json.loads(capsys.readouterr().out)
    assert {f["what"] for f in found["findings"]} >= {"python", "disk here", "loopback", "plugins"}
    transports = {f["what"]: f for f in found["findings"] if f["what"].startswith("kv by ")}
    assert transports["kv by tcp"]["level"] == "ok"
    assert "nixl" in transports["kv by nixl"]["found"].lower()
    assert any(f["what"] == "environment vllm" for f in found["findings"])

    monkeypatch.setattr(doctor, "LOOKS", (lambda: iter([doctor.Finding("disk", "bad", "full", "Free some.")]),))
    with pytest.raises(SystemExit) as caught:
        doctor.examine(Console())
    assert caught.value.code == 1
    assert capsys.readouterr().out == " bad  disk: full\n      Free some.\n"


def test_the_doctor_tells_what_a_sandbox_gets_here():
    from gyre_rl.cli import doctor

    class Told:
        async def examine(self):
            return (("isolation", "thick", ""), ("limits", "looks", "is slow"))

        async def close(self):
            """Nothing is held."""

    class Broken(Told):
        async def examine(self):
            raise ConfigError("starting it", got="no kernel", expected="one")

    thick, looks = asyncio.run(doctor.told_of("told", Told()))
    assert (thick.what, thick.level, thick.found) == ("sandbox told: isolation", "ok", "thick")
    assert (looks.level, looks.fix) == ("warn", "is slow")
    [broken] = asyncio.run(doctor.told_of("broken", Broken()))
    assert (broken.level, "no kernel" in broken.found) == ("bad", True)
    assert doctor.sandboxes in doctor.LOOKS


@pytest.mark.slow
def test_the_whole_doctor_runs(tmp_path):
    found = json.loads(gyre("doctor", "--json", cwd=tmp_path).stdout)
    assert "torch" in {f["what"] for f in found["findings"]}


def test_listing_names_what_is_unusable_and_broken():
    from gyre_core import Kind, PluginManager, Registration, hookimpl
    from gyre_core.plugins import BrokenPlugin
    from gyre_rl.cli.listing import as_row, as_text

    class Plugin:
        @hookimpl
        def gyre_register(self):
            yield Registration(Kind.ENGINE, "far", "a:B", requires=("no_such_module_here",), summary="an engine")

    manager = PluginManager()
    manager.add(Plugin(), "gyre-far", "2.0")
    manager.broken.append(BrokenPlugin("bad", "gyre-bad", "ImportError: x"))
    broken = [{"name": b.name, "distribution": b.distribution, "reason": b.reason} for b in manager.broken]
    text = as_text([as_row(c) for c in manager.components()], broken)
    assert "engine  far  gyre-far 2.0  unusable: install no_such_module_here" in text
    assert "broken: bad of gyre-bad: ImportError: x" in text
    assert "No plugin" in as_text([], [])


def test_importing_the_command_imports_nothing_heavy():
    heavy = ["torch", "numpy", "msgspec", "rich.live", "gyre_core", "gyre_tito", "gyre_sched", "aiohttp", "pydantic"]
    code = f"import sys, gyre_rl.cli.app; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
