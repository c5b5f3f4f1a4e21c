"""The command line: what can be typed, and which function of the library answers it.

Invariant: with `--json` standard output carries exactly one line of JSON, the last thing printed; everything for a
person who waits goes to standard error. Heavy modules are imported inside the commands that need them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyre_rl.cli.console import Console, reported

PLUGIN_KINDS = "engine, harness, launcher, objective, policy, sandbox, scorer, sink, taskset, trainer"
"""What `plugin new` has templates for (gyre_rl.scaffold.KINDS, which would import gyre-core; a test compares them)."""

app = typer.Typer(
    name="gyre",
    help="Online RL for long-running language-model agents on elastic cells.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

plugin_app = typer.Typer(help="Write plugins.", no_args_is_help=True)
app.add_typer(plugin_app, name="plugin")

Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Lay one key over the file: --set rollout.group_size=4."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
Source = Annotated[Path, typer.Argument(metavar="FILE|DIR", help="The run's TOML file, or a folder with a gyre.toml.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"gyre-rl {version('gyre-rl')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Online RL for long-running language-model agents on elastic cells."""


@app.command()
def run(
    source: Source,
    sets: Sets = [],  # noqa: B006 - typer copies it
    json: Json = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines of text instead of the live view.")] = False,
    debug: Debug = False,
) -> None:
    """Train: carry out the run that a file describes. Ctrl-C stops it in order, resumable."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.training import start

        start(source, sets, console, plain=plain)


@app.command()
def resume(
    run_dir: RunDir,
    sets: Sets = [],  # noqa: B006
    json: Json = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines of text instead of the live view.")] = False,
    debug: Debug = False,
) -> None:
    """Go on with a run that was stopped or killed."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.training import go_on

        go_on(run_dir, sets, console, plain=plain)


@app.command()
def check(
    source: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run's file or folder, a run directory, or rollouts.")
    ],
    sets: Sets = [],  # noqa: B006
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="The run is for another machine: check the file alone.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved configuration.")] = False,
    model: Annotated[Path | None, typer.Option("--model", help="Recordings: folder of the tokenizer.")] = None,
    notes: Annotated[bool, typer.Option("--notes", help="Recordings: show notes, too.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a run's file, its plugins' sections and this machine; or hold the laws against what was recorded."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.recordings import is_recording, tito

        if is_recording(source):
            chosen = [*(["--notes"] if notes else []), *(["--model", str(model)] if model else [])]
            tito("check", [str(source), *chosen], console)
        else:
            from gyre_rl.cli.checking import check_config

            check_config(source, sets, console, machine=not elsewhere, show=show)


@app.command()
def tree(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory or a trajectory store.")],
    execution: Annotated[str, typer.Argument(metavar="[EXECUTION]", help="Show its tree instead of the list.")] = "",
    call: Annotated[int | None, typer.Option("--call", help="Show the tokens of this call's path.")] = None,
    diff: Annotated[int | None, typer.Option("--diff", help="With --call: where that call and this one part.")] = None,
    last: Annotated[int | None, typer.Option("--last", help="With --call: only the last so many tokens.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Folder of the tokenizer, to show text.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write the calls to a .parquet or .jsonl file.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the executions of a run, show one's trajectory tree down to its tokens, or export them."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.recordings import tito

        chosen = [str(source), *([execution] if execution else [])]
        options = {"--call": call, "--diff": diff, "--last": last, "--model": model, "--export": export}
        for name, value in options.items():
            chosen += [] if value is None else [name, str(value)]
        tito("tree", chosen, console)


@app.command()
def plan(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="A trace, or a run's scheduler log.")] = None,
    preset: Annotated[str, typer.Option("--preset", help="Published workload and cluster.")] = "qwengyre",
    cells: Annotated[int | None, typer.Option("--cells", help="Another number of cells.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Another number of steps.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the simulated work.")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the lanes of the cells.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Simulate a workload on colocated, static and elastic cells: is this worth it, and what could it reach at best?"""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.recordings import plan as planned

        chosen = [*([str(trace)] if trace else []), "--preset", preset, "--seed", str(seed)]
        for name, value in (("--cells", cells), ("--steps", steps), ("--html", html)):
            chosen += [] if value is None else [name, str(value)]
        planned(chosen, console)


@app.command()
def replay(
    run_dir: RunDir,
    story: Annotated[str, typer.Option("--story", help="A cell, session, execution, group or lease.")] = "",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Replay the scheduler's log; with --story, tell what happened to one thing, and why."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.recordings import replay_scheduler

        replay_scheduler(run_dir, story, console)


@app.command()
def plugins(
    kind: Annotated[str, typer.Argument(metavar="[KIND", help="A kind of component, such as engine.")] = "",
    name: Annotated[str, typer.Argument(metavar="NAME]", help="One of its components: show its options.")] = "",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List what is installed, and why something is unusable; with KIND and NAME, show its options."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.listing import list_plugins, show_options

        if name:
            show_options(console, kind, name)
        else:
            list_plugins(console, kind)


@plugin_app.command()
def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=PLUGIN_KINDS)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the component, such as my-thing.")],
    into: Annotated[Path, typer.Option("--into", help="Folder to write gyre-NAME into.")] = Path(),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a plugin package that works and passes the conformance suite of its kind as it is."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.scaffold import write_plugin

        written = [str(path) for path in write_plugin(kind, name, into)]
        after = f"cd {into / f'gyre-{name}'} && uv pip install -e '.[test]' && pytest"
        console.result({"ok": True, "files": written}, "\n".join([*written, "", f"Next:  {after}"]))


@app.command()
def doctor(
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Look at this machine: what works, what does not, and what to do about it."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli.doctor import examine

        examine(console)


@app.command()
def dash(
    run_dir: RunDir,
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    debug: Debug = False,
) -> None:
    """Show a run as web pages while it goes on: the report, its executions, their trees down to the tokens."""
    console = Console(debug=debug)
    with reported(console):
        from gyre_rl.cli.showing import show_dash

        show_dash(run_dir, host, port, console)


TaskSetName = Annotated[str, typer.Option("--tasks", help="Task set by name.")]
TaskId = Annotated[str, typer.Option("--task", help="A task's id, or its last part.")]
Split = Annotated[str | None, typer.Option("--split", help="Split to look in; heldout and train when absent.")]
Bench = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="An option: --set tasks.seed=3, --set limits.max_turns=9."),
]


@app.command()
def score(
    tasks: TaskSetName,
    task: TaskId,
    workspace: Annotated[
        Path | None, typer.Option("--workspace", help="Folder to judge; the task's own start.")
    ] = None,
    split: Split = None,
    sets: Bench = [],  # noqa: B006
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge a folder as if an agent had left it."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.cli import authoring

        authoring.score(authoring.make_bench(tasks, sets), task, workspace, split, console)


@app.command()
def agent(
    tasks: TaskSetName,
    task: TaskId,
    base_url: Annotated[str, typer.Option("--base-url", help="OpenAI-compatible end point; ends in /v1.")],
    model: Annotated[str, typer.Option("--model", help="Name of the model there.")],
    api_key: Annotated[str, typer.Option("--api-key", help="Key for the end point.")] = "none",
    temperature: Annotated[float, typer.Option("--temperature")] = 1.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    keep: Annotated[Path | None, typer.Option("--keep", help="Copy the workspace into this folder.")] = None,
    split: Split = None,
    sets: Bench = [],  # noqa: B006
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Let one agent work on a task against any end point, show it live, and judge what it left."""
    console = Console(json, debug)
    with reported(console):
        from gyre_core.agents import ModelEndpoint

        from gyre_rl.cli import authoring

        bench, endpoint = authoring.make_bench(tasks, sets), ModelEndpoint(base_url, api_key, model)
        authoring.agent(bench, task, endpoint, console, split=split, temperature=temperature, seed=seed, keep=keep)


@app.command()
def report(
    run_dir: RunDir,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the HTML report of a run, finished or not, from its event log."""
    console = Console(json, debug)
    with reported(console):
        from gyre_rl.views.report import write_report

        path = write_report(run_dir)
        console.result({"report": str(path)}, str(path))
