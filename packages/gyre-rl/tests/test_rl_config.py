"""The configuration: read, merged, refused with every problem at once, written and read back."""

from __future__ import annotations

import dataclasses
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gyre_core import ConfigError, Kind, Registration, hookimpl
from gyre_core.plugins import PluginManager
from gyre_rl.config import PluginChoice, RunConfigError, dump, dumps, load, loads
from gyre_rl.config.convert import Converter
from gyre_rl.config.dump import MASK, masked_keys, to_table
from gyre_rl.config.load import from_layers, set_layer, text_layer
from gyre_rl.config.locate import key_lines
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, slots=True)
class EngineOptions:
    slots: int = 8
    device_map: dict[str, int] = dataclasses.field(default_factory=dict)
    inner: Inner = Inner()
    extra: tuple[Inner, ...] = ()
    note: str | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError("slots is below 1")


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    ready_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    objective: str = "ppo"


class Plugin:
    @hookimpl
    def gyre_register(self):
        options = "gyre_test_options:EngineOptions"
        yield Registration(Kind.ENGINE, "local", "nowhere:Engine", options=options)
        yield Registration(Kind.ENGINE, "other", "nowhere:Other")
        yield Registration(Kind.ENGINE, "absent", "nowhere:Absent", requires=("no_such_module_here",))
        for kind, name in [
            (Kind.TRAINER, "local"),
            (Kind.HARNESS, "shell"),
            (Kind.SANDBOX, "local"),
            (Kind.LAUNCHER, "local"),
            (Kind.TASKSET, "files"),
            (Kind.SINK, "prometheus"),
            (Kind.POLICY, "watermark"),
            (Kind.POLICY, "static"),
        ]:
            yield Registration(kind, name, "nowhere:It")
        yield Registration(Kind.POLICY, "own", "nowhere:Own", options="gyre_test_options:PolicyOptions")
        yield Registration(Kind.TRAINER, "other", "nowhere:It", options="gyre_test_options:TrainerOptions")
        yield Registration(Kind.OBJECTIVE, "capped", "my_objectives:Capped")
        yield Registration(Kind.TRANSPORT, "pigeon", "nowhere:Pigeon")
        yield Registration(Kind.TRANSPORT, "absent", "nowhere:Absent", requires=("no_such_module_here",))


@pytest.fixture
def plugins(monkeypatch):
    module = types.ModuleType("gyre_test_options")
    module.EngineOptions = EngineOptions
    module.PolicyOptions = PolicyOptions
    module.TrainerOptions = TrainerOptions
    monkeypatch.setitem(sys.modules, "gyre_test_options", module)
    manager = PluginManager()
    manager.add(Plugin())
    return manager


SMALL = 'name = "small"\ntasks = "files"\n[model]\npath = "policy"\n'


def problems_of(text, plugins, base_dir="/"):
    with pytest.raises(RunConfigError) as caught:
        loads(text, base_dir, plugins)
    return [str(p) for p in caught.value.problems]


def test_a_small_file_is_enough(plugins):
    config = loads(SMALL, "/base", plugins)
    assert config.tasks == PluginChoice("files")
    assert config.engine == PluginChoice("local", EngineOptions())
    assert config.limits.max_call_tokens == 1024
    assert config.model_dir == Path("/base/policy") == config.tokenizer_dir


def test_every_problem_is_reported_at_once_with_its_line(plugins):
    text = SMALL + (
        "[rollout]\n"
        "group_sizes = 4\n"
        'temperature = "hot"\n'
        "top_p = 1.5\n"
        "[engine]\n"
        "slotz = 3\n"
        'device_map = {a = "b"}\n'
        "[loss]\n"
        'estimator = "grop"\n'
        "group_size = 3\n"
    )
    found = problems_of(text, plugins)
    assert found == [
        "text:6: rollout.group_sizes: unknown key; did you mean 'group_size'?",
        'text:7: rollout.temperature: got "hot", expected a number, above 0',
        "text:8: rollout.top_p: got 1.5, expected a number, above 0 and at most 1",
        "text:10: engine.slotz: unknown key; did you mean 'slots'?",
        'text:11: engine.device_map: got {"a": "b"} (at [...]), expected a table',
        'text:13: loss.estimator: got "grop", expected "grpo", "centre" or "leave_one_out"',
        "text:14: loss.group_size: unknown key; 'group_size' belongs in [rollout]",
    ]


def test_missing_keys_are_named(plugins):
    found = problems_of("", plugins)
    assert any(p.startswith("name: missing; expected text") for p in found)
    assert any(p.startswith("model: missing") for p in found)
    assert any(p.startswith("tasks: missing") for p in found)


def test_a_missing_plugin_names_the_nearest_and_what_to_do(plugins):
    (problem,) = problems_of('engine = "lokal"\n' + SMALL, plugins)
    assert "engine.name" in problem
    assert "Did you mean 'local'?" in problem
    assert "gyre plugins" in problem


def test_a_plugin_whose_modules_are_missing_is_a_problem(plugins):
    (problem,) = problems_of('engine = "absent"\n' + SMALL, plugins)
    assert "no_such_module_here" in problem


def test_the_trainer_must_take_the_temperature_that_was_sampled_at():
    installed = PluginManager.installed()
    text = 'name = "small"\nmodel.path = "m"\ntasks = "files"\nrollout.temperature = 0.7\n'
    loads(text + "[trainer]\ntemperature = 0.7\n", "/", installed)
    (problem,) = problems_of(text, installed)
    assert "trainer.temperature: got 1.0, expected 0.7" in problem


def test_options_for_a_plugin_without_options_are_problems(plugins):
    (problem,) = problems_of(SMALL + "[trainer]\nlr = 1e-3\n", plugins)
    assert problem == "text:6: trainer.lr: unknown key; the trainer 'local' takes no options"


def test_what_a_plugin_refuses_itself_is_a_problem_of_its_section(plugins):
    (problem,) = problems_of(SMALL + "[engine]\nslots = 0\n", plugins)
    assert problem == "text:5: engine: slots is below 1"


def test_nested_options_and_lists_of_tables(plugins):
    text = SMALL + "[engine]\ninner = {depth = 3}\n[[engine.extra]]\ndepth = 4\n[[engine.extra]]\ndepth = 5\n"
    options = loads(text, "/", plugins).engine.options
    assert options.inner == Inner(3)
    assert options.extra == (Inner(4), Inner(5))
    (problem,) = problems_of(text.replace("depth = 5", "dept = 5"), plugins)
    assert problem == "text:10: engine.extra.1.dept: unknown key; did you mean 'depth'?"


def test_a_wrong_kind_of_section_is_a_problem(plugins):
    assert problems_of("rollout = 3\n" + SMALL, plugins) == ["text:1: rollout: got 3, expected a table"]
    assert problems_of("engine = 3\n" + SMALL, plugins) == [
        "text:1: engine: got 3, expected the engine's name or its section"
    ]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("[cells]\ncount = 2\ntrain = 3\n", "cells.train: got 3 of 2 cells"),
        ("[cells]\ncount = 2\ntrain = 2\n", "cells.train: got all cells"),
        ("[rollout]\ngroup_size = 1\n", "no execution would ever train"),
        ("[rollout]\nmax_in_flight = 3\n", "8 executions of one group"),
        ('[eval]\nsplit = "train"\n', "the split that is trained on"),
    ],
)
def test_checks_between_sections(plugins, extra, words):
    (problem,) = problems_of(SMALL + extra, plugins)
    assert words in problem
    assert problem.startswith("text:")


def test_sets_lie_over_the_file_and_plain_words_are_text(plugins, tmp_path):
    (tmp_path / "gyre.toml").write_text(SMALL)
    config = load(tmp_path, ["seed=7", "rollout.group_size = 4", "engine.note=fast", "engine.slots=2"], plugins)
    assert (config.seed, config.rollout.group_size, config.engine.options.note) == (7, 4, "fast")
    assert config.base_dir == str(tmp_path)


def test_a_wrong_set_is_named_as_it_was_typed(plugins, tmp_path):
    (tmp_path / "gyre.toml").write_text(SMALL)
    with pytest.raises(RunConfigError, match=r"--set rollout\.group_sise=4: rollout\.group_sise: unknown key"):
        load(tmp_path, ["rollout.group_sise=4"], plugins)
    for text in ("seed", "=3", "a b=3"):
        with pytest.raises(ConfigError, match="--set"):
            load(tmp_path, [text], plugins)


def test_another_plugin_takes_nothing_of_the_old_ones_options(plugins, tmp_path):
    (tmp_path / "gyre.toml").write_text(SMALL + "[engine]\nslots = 3\n")
    assert load(tmp_path, ["engine=other"], plugins).engine == PluginChoice("other")
    assert load(tmp_path, ['engine.name="local"'], plugins).engine.options.slots == 3


def test_extends_is_relative_to_the_file_and_later_keys_win(plugins, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "common.toml").write_text(SMALL + "[rollout]\ngroup_size = 3\ntemperature = 0.5\n")
    file = tmp_path / "run.toml"
    file.write_text('extends = "base/common.toml"\n[rollout]\ngroup_size = 5\n')
    config = load(file, (), plugins)
    assert (config.rollout.group_size, config.rollout.temperature) == (5, 0.5)
    file.write_text('extends = "base/common.toml"\n[rollout]\ngroup_size = -5\n')
    with pytest.raises(RunConfigError, match=r"run\.toml:3: rollout\.group_size: got -5"):
        load(file, (), plugins)


def test_extends_in_a_circle_is_refused(plugins, tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(ConfigError, match="circle"):
        load(tmp_path / "a.toml", (), plugins)


def test_files_that_cannot_be_read(plugins, tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "no.toml", (), plugins)
    with pytest.raises(ConfigError, match=r"a folder with a gyre\.toml"):
        load(tmp_path, (), plugins)
    (tmp_path / "gyre.toml").write_text("name = small\n")
    with pytest.raises(ConfigError, match=r"not TOML.*line 1"):
        load(tmp_path, (), plugins)
    (tmp_path / "gyre.toml").write_bytes(b"name = '\xff'\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path, (), plugins)


def test_the_resolved_form_reads_back_to_an_equal_configuration(plugins, tmp_path):
    (tmp_path / "gyre.toml").write_text(
        'sinks = ["prometheus"]\ndeadline_s = 3\n' + SMALL + '[engine]\nnote = "a\\"b\\\\ \\u007f"\n'
        'device_map = {"x y" = 1}\nextra = [{depth = 2}]\n[loss]\ngate = "off"\n'
    )
    config = load(tmp_path, (), plugins)
    text = dumps(config)
    assert loads(text, "/elsewhere", plugins) == config
    assert "micro_batch_tokens" in text


def test_secrets_are_masked_where_others_may_see_them(plugins, tmp_path):
    (tmp_path / "gyre.toml").write_text(
        SMALL + '[engine]\nnote = "a text"\ndevice_map = {"api_key" = 1}\nextra = [{depth = 2}]\n'
    )
    config = load(tmp_path, (), plugins)
    table = {
        "api_key": "k-1",
        "api_key_env": "KEY",
        "token": "",
        "micro_batch_tokens": 3,
        "scorers": [{"rubric": {"API_KEY": "k-2"}}],
        "env": {"OPENAI_API_KEY": "k-3", "HOME": "/x"},
    }
    assert dump._masked(table) == {
        "api_key": MASK,
        "api_key_env": "KEY",
        "token": "",
        "micro_batch_tokens": 3,
        "scorers": [{"rubric": {"API_KEY": MASK}}],
        "env": {"OPENAI_API_KEY": MASK, "HOME": "/x"},
    }
    assert dumps(config, masked=True) == dumps(config)
    assert masked_keys(config) == []
    engine = replace(config.engine, options=replace(config.engine.options, note=MASK))
    assert masked_keys(replace(config, engine=engine)) == ["engine.note"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAF = st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.booleans(), TEXT)
TABLES = st.dictionaries(
    TEXT, st.recursive(LEAF, lambda c: st.lists(c, max_size=3) | st.dictionaries(TEXT, c, max_size=3))
)


@given(TABLES)
def test_the_writer_writes_any_table_as_toml(table):
    import tomllib

    from gyre_rl.config.dump import _table

    assert tomllib.loads("\n".join(_table(to_table(table), ()))) == table


@given(TABLES)
def test_the_locator_knows_every_key_of_valid_toml(table):
    from gyre_rl.config.dump import _table

    text = "\n".join(_table(to_table(table), ()))
    lines = text.split("\n")
    places = key_lines(text)
    for key, value in table.items():
        if "." not in key:
            assert 1 <= places[key] <= len(lines)
        if not isinstance(value, dict | list) and "." not in key:
            assert lines[places[key] - 1].split(" = ")[0].strip() != ""


def test_the_locator_is_not_led_astray_by_strings_and_comments():
    text = '''a = """
b = 1
[c]
""" # [d]
e = [ # comment with ]
  "]", { f = "}" },
]
[g."h.i"]
'j' = 'k = 1'
[[l]]
m = 1
[[l]]
m = 2
'''
    assert key_lines(text) == {
        "a": 1, "e": 5, "g": 8, "g.h.i": 8, "g.h.i.j": 9, "l": 10, "l.0": 10, "l.0.m": 11, "l.1": 12, "l.1.m": 13,
    }  # fmt: skip


def test_values_are_not_converted_by_guess(plugins):
    converter = Converter(plugins.options_type)
    converter.build(EngineOptions, {"slots": "3", "note": 4})
    assert [p.message for p in converter.problems] == [
        'got "3", expected a whole number',
        "got 4, expected text",
    ]


def test_the_schedulers_section_has_the_names_and_defaults_of_gyre_sched(plugins):
    from gyre_rl.config.scheduling import sched_config
    from gyre_sched import SchedConfig

    config = loads(SMALL + "[rollout]\nmax_staleness = 3\nretries = 5\n[scheduler]\nlow = 0.5\n", "/", plugins)
    made = sched_config(config, first_version=7)
    expected = SchedConfig(first_version=7, groups_per_step=8, max_staleness=3, max_retries=5, low=0.5)
    assert made == expected


def test_what_the_scheduler_refuses_is_a_problem_of_its_section(plugins):
    (problem,) = problems_of(SMALL + "[scheduler]\nlow = 0.9\nhigh = 0.5\n", plugins)
    assert problem.startswith("text:5: scheduler: watermarks are low=0.9, high=0.5")


def test_a_policy_is_a_plugin_with_a_section_of_its_own(plugins):
    assert loads(SMALL, "/", plugins).scheduler.policy == PluginChoice("watermark")
    text = SMALL + '[scheduler]\nlow = 0.5\n[scheduler.policy]\nname = "own"\nready_tokens = 7\n'
    config = loads(text, "/", plugins)
    assert config.scheduler.policy == PluginChoice("own", PolicyOptions(7))
    assert loads(dumps(config), "/", plugins) == config
    assert loads(SMALL + '[scheduler]\npolicy = "static"\n', "/", plugins).scheduler.policy.name == "static"
    (problem,) = problems_of(text + "ready_token = 1\n", plugins)
    assert "scheduler.policy.ready_token: unknown key; did you mean 'ready_tokens'?" in problem
    (problem,) = problems_of(SMALL + '[scheduler]\npolicy = "watermarks"\n', plugins)
    assert "Did you mean 'watermark'?" in problem


def test_another_policy_takes_nothing_from_the_old_ones_section(plugins):
    layers = [
        text_layer(SMALL + '[scheduler.policy]\nname = "own"\nready_tokens = 7\n', "text"),
        set_layer("scheduler.policy=static"),
    ]
    assert from_layers(layers, "text", plugins, base_dir="/").scheduler.policy == PluginChoice("static")
    layers[1] = set_layer("scheduler.policy.ready_tokens=9")
    assert from_layers(layers, "text", plugins, base_dir="/").scheduler.policy.options == PolicyOptions(9)


def test_a_plugins_objective_is_named_by_its_class(plugins):
    for name, found in (("capped", "my_objectives:Capped"), ("gspo", "gspo"), ("a.b:C", "a.b:C")):
        config = loads(SMALL + f'[trainer]\nname = "other"\nobjective = "{name}"\n', "/", plugins)
        assert config.trainer.options == TrainerOptions(found)


def test_the_reference_page_is_what_the_dataclasses_say():
    from gyre_rl.config.reference import page

    file = Path(__file__).resolve().parents[3] / "docs" / "reference" / "config.md"
    assert file.read_text() == page(), "python -m gyre_rl.config.reference > docs/reference/config.md"


def test_every_key_of_the_configuration_has_a_text():
    from gyre_rl.config.reference import entries, sections
    from gyre_rl.config.schema import RunConfig

    for path, cls in [("", RunConfig), *sections(RunConfig)]:
        for entry in entries(cls):
            assert entry.text, f"{path}.{entry.name} has no docstring"


def test_the_options_of_a_plugin_can_be_described():
    from gyre_rl.config.reference import describe_options

    text = describe_options(EngineOptions)
    assert "slots: a whole number; default 8" in text
    assert "note: text; default absent" in text
    assert "[inner]\n  depth: a whole number; default 1" in text


PENDING: set[str] = set()
"""Keys that the run does not read yet: none, and so it stays."""


def test_every_key_is_read_by_somebody():
    import re

    from gyre_rl.config.reference import sections
    from gyre_rl.config.schema import RunConfig

    folder = Path(__file__).resolve().parents[1] / "src" / "gyre_rl"
    readers = [p for p in folder.rglob("*.py") if p.parent.name != "config" or p.name == "scheduling.py"]
    code = "\n".join(path.read_text() for path in readers)
    unread = set()
    for path, cls in [("", RunConfig), *sections(RunConfig)]:
        if path.partition(".")[0] in ("limits", "scheduler"):
            continue  # handed on whole
        owner = rf"(?:{path}|config)" if path else "config"
        for field in dataclasses.fields(cls):
            if not re.search(rf"\b{owner}\.{field.name}\b", code):
                unread.add(f"{path}.{field.name}".lstrip("."))
    assert unread <= PENDING, "a key that nobody reads is a setting that somebody believes in"


def test_the_transport_is_one_that_there_is(plugins):
    for name in ("auto", "tcp", "pigeon"):
        assert loads(SMALL + f'[kv]\ntransport = "{name}"\n', "/", plugins).kv.transport == name
    assert problems_of(SMALL + '[kv]\ntransport = "absent"\n', plugins), "its modules are missing"
    (problem,) = problems_of(SMALL + '[kv]\ntransport = "pigeons"\n', plugins)
    assert problem.startswith("text:6: kv.transport: got 'pigeons', expected one of auto, process_vm, nixl, shm, tcp")
    assert problem.endswith("did you mean 'pigeon'?")
