"""Options of this plugin's components: plain frozen dataclasses, checked when made.

Invariant: defaults give a component that works on any Linux host. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gyre_core.errors import ConfigError

ISOLATION_LEVELS = ("auto", "namespaces", "landlock", "none")
TOOL_NAMES = ("bash", "read", "write", "edit", "task")
COMPACTION_MODES = ("none", "elide", "summary")


def _one_of(owner: str, key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"reading {owner} option {key!r}", got=repr(value), expected=f"one of {', '.join(allowed)}")


def _positive(owner: str, **values: float | None) -> None:
    for key, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"reading {owner} option {key!r}", got=repr(value), expected="a number above 0")


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Sandbox `local`: where workspaces are, how far they are isolated, and the limits of each command."""

    root: str | None = None
    """Folder of the workspaces; None: `workspaces` in the run's folder."""
    isolation: str = "auto"
    """`namespaces` (own user, mount, process, network and IPC namespaces), `landlock`, `none`, or `auto`: the first
    of these that the kernel grants."""
    require: bool = False
    """With `auto`: refuse to start when the kernel grants less than `namespaces`."""
    network: str = "none"
    """`none`: a loopback of its own and nothing else; `host`: the host's network."""
    visible: tuple[str, ...] = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
    """Host folders that commands can read."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the clean environment of every command."""
    memory_mb: int = 4096
    """Address space of one process; 0: unlimited (node, for one, reserves more than that)."""
    total_memory_mb: int = 4096
    """Of all processes of a workspace together; a command that exceeds it is ended. Without a control group (see
    `cgroup`) it is looked at four times a second."""
    file_mb: int = 1024
    """Largest file."""
    disk_mb: int = 4096
    """Of workspace, home and tmp together; a command that exceeds it is ended. Looked at four times a second."""
    processes: int = 256
    """Processes and threads of one workspace at a time."""
    cgroup: str = "auto"
    """Where control groups for workspaces are made: `auto` (below this process's own group, if the kernel grants it),
    `none`, or a folder of version 2 that was delegated to this user and holds no process. With a group, the kernel
    itself keeps `total_memory_mb` and `processes`."""
    cpu_s: int = 3600
    """CPU seconds of one process."""
    open_files: int = 1024
    uid_base: int = 210_000
    """Started as root, workspace number n runs under user id `uid_base + n % 10000`."""
    keep: bool = False
    """Leave the folders of closed workspaces on disk."""

    def __post_init__(self) -> None:
        owner = "the sandbox 'local'"
        _one_of(owner, "isolation", self.isolation, ISOLATION_LEVELS)
        if self.cgroup not in ("auto", "none") and not self.cgroup.startswith("/"):
            raise ConfigError(
                f"reading {owner} option 'cgroup'", got=repr(self.cgroup), expected="auto, none or an absolute path"
            )
        _one_of(owner, "network", self.network, ("none", "host"))
        _positive(
            owner,
            total_memory_mb=self.total_memory_mb,
            file_mb=self.file_mb,
            disk_mb=self.disk_mb,
            processes=self.processes,
            cpu_s=self.cpu_s,
            open_files=self.open_files,
        )


@dataclass(frozen=True, slots=True)
class ShellOptions:
    """Harness `shell`: the tools it offers, its sub-agents, its compaction, its patience with the endpoint."""

    tools: tuple[str, ...] = ("bash", "read", "write", "edit")
    """Offered in this order; `task` lets the agent start sub-agents."""
    descriptions: Mapping[str, str] = field(default_factory=dict)
    """Tool name -> description, instead of the built-in one."""
    system: str | None = None
    """System message; a task's own takes precedence. None: no system message."""
    shell: tuple[str, ...] = ("bash", "-c")
    """Runs the command of tool `bash`, given as the last argument."""
    sub_agent_turns: int = 16
    """Model calls of one sub-agent."""
    sub_agent_depth: int = 1
    """How deep sub-agents may nest; 1: a sub-agent cannot start another."""
    compact: str = "none"
    """`none`; `elide`: old tool results become `elided_text`; `summary`: the conversation starts again from the
    task and a summary that the model writes."""
    compact_after_turns: int | None = None
    """Compact once so many model calls were answered since the start or the last compaction."""
    compact_tokens: int | None = None
    """Compact once a call's prompt and answer together had so many tokens."""
    compact_keep: int = 2
    """`elide`: so many of the latest tool results stay."""
    elided_text: str = "[elided]"
    summary_prompt: str = (
        "Your context is full and will be cleared. Write down for yourself what was done, what was found and what is "
        "left to do. Only the task and what you write now will remain."
    )
    call_markers: tuple[str, ...] = ("<tool_call>",)
    """An answer that holds one of these but no readable call is a spoilt call, not the end."""
    retries: int = 8
    """Further tries of a model call on connection errors, 429 and 5xx."""
    retry_first_s: float = 0.2
    """Pause before the first further try; doubles up to 10 s."""
    send_seed: bool = True
    """Send `seed`, derived from the execution's and the call's number."""
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Added to the body of every model call."""

    def __post_init__(self) -> None:
        owner = "the harness 'shell'"
        _one_of(owner, "compact", self.compact, COMPACTION_MODES)
        for name in (*self.tools, *self.descriptions):
            _one_of(owner, "tools", name, TOOL_NAMES)
        _positive(
            owner,
            sub_agent_turns=self.sub_agent_turns,
            compact_after_turns=self.compact_after_turns,
            compact_tokens=self.compact_tokens,
        )
        if self.compact != "none" and self.compact_after_turns is None and self.compact_tokens is None:
            raise ConfigError(
                f"reading {owner} option 'compact'",
                got=f"{self.compact!r} without a trigger",
                expected="compact_after_turns or compact_tokens to be set",
            )


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """Harness `command`: which program, and how it is told of its task and its model.

    In `argv` and the values of `env` these are replaced: `{prompt}`, `{system}`, `{base_url}` (ends in /v1),
    `{host_url}` (the same without it), `{api_key}`, `{model}`, `{temperature}`, `{max_tokens}`. OPENAI_BASE_URL,
    OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and GYRE_MODEL are set in any case, and GYRE_PROMPT unless the
    prompt is too long for the environment.
    """

    argv: tuple[str, ...] = ()
    """The program and its arguments, as the sandbox sees them; they have no default."""
    env: Mapping[str, str] = field(default_factory=dict)
    prompt_on_stdin: bool = False
    output_bytes: int = 1 << 16
    """Of what it prints that are kept."""
    longest_s: float = 86_400.0
    """Seconds it may run when the execution has no limit of time."""

    def __post_init__(self) -> None:
        owner = "the harness 'command'"
        _positive(owner, output_bytes=self.output_bytes, longest_s=self.longest_s)
        if not self.argv:
            raise ConfigError(f"reading {owner} option 'argv'", got="nothing", expected="a program and its arguments")


@dataclass(frozen=True, slots=True)
class MiniSweOptions:
    """Harness `mini-swe`: the agent of the package mini-swe-agent, unchanged."""

    python: str | None = None
    """Interpreter of an environment that has mini-swe-agent; None: this one, or the environment `harnesses`."""
    config: str = "mini"
    """Its configuration: a name it knows, or a file."""
    model_prefix: str = "openai/"
    """Put before the model's name, to say which dialect is spoken."""
    model_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Added to the arguments of every model call."""


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """Sandbox `docker`: which image, under which limits."""

    image: str = "debian:stable-slim"
    """Needs sh, realpath, find, head and tar, as all common images have."""
    client: str = "docker"
    """The command line; podman's works too."""
    workdir: str = "/workspace"
    network: str = "none"
    memory_mb: int = 4096
    cpus: float = 2.0
    processes: int = 512
    user: str | None = None
    """User that commands run as, as the client takes it; None: the image's."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the client's `run`, such as a runtime or a mount."""
    snapshot_bytes: int = 1 << 32
    """Largest snapshot; it passes through this process's memory."""

    def __post_init__(self) -> None:
        owner = "the sandbox 'docker'"
        _positive(owner, memory_mb=self.memory_mb, cpus=self.cpus, processes=self.processes)
        if not self.workdir.startswith("/") or self.workdir.rstrip("/") != self.workdir:
            raise ConfigError(
                f"reading {owner} option 'workdir'",
                got=repr(self.workdir),
                expected="an absolute path without a slash at its end",
            )


@dataclass(frozen=True, slots=True)
class SweRexOptions:
    """Sandbox `swe-rex`: where its servers are. Either servers that run already, or a program that starts one."""

    urls: tuple[str, ...] = ()
    """Servers that run, such as "http://box-7:8000", used in turn. Workspaces behind one server are folders beside one
    another: give each server to one run, and know that they are not isolated from each other."""
    token: str = ""
    """Of those servers."""
    start: tuple[str, ...] = ("swerex-remote", "--auth-token", "{token}", "--port", "{port}")
    """Without `urls`: starts a server for each workspace, reached on this host's loopback at `{port}`; a container
    client's `run` with that port published, for instance. The default isolates nothing."""
    workdir: str = "/tmp/gyre-rex"
    """On the far side, which needs sh, setsid, realpath, find, tar and base64."""
    start_s: float = 180.0
    """Seconds until a server must answer."""

    def __post_init__(self) -> None:
        owner = "the sandbox 'swe-rex'"
        _positive(owner, start_s=self.start_s)
        if not self.urls and not self.start:
            raise ConfigError(f"reading {owner}", got="neither urls nor start", expected="one of them")
        if not self.workdir.startswith("/"):
            raise ConfigError(f"reading {owner} option 'workdir'", got=repr(self.workdir), expected="an absolute path")


@dataclass(frozen=True, slots=True)
class VerifiersOptions:
    """Harness and task set `verifiers`: which environment of the package, and where it is installed. Both take the same
    options, so that the one plays what the other lists."""

    environment: str = ""
    """Id of an installed environment (in the package's words: of its taskset). Needed."""
    python: str | None = None
    """Interpreter of an environment that has verifiers 0.4 and the environment's package; None: this one, or the
    environment `harnesses`."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Further keys of the environment's `taskset` table."""
    harness: str = "null"
    """The package's harness that plays the one agent; "null" is its plain chat loop."""
    runtime: str = "subprocess"
    """Where the package runs that harness: "subprocess" is this host, without isolation; "docker" and others as it has
    them."""
    table: Mapping[str, object] = field(default_factory=dict)
    """Keys of the package's `env` table that replace the ones made of the options above."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the clean environment of its process; PATH begins with the interpreter's folder, where its uv is."""
    heldout_one_in: int = 5
    most_tasks: int = 10_000
    """Tasks that are listed at most; environments may have no end."""

    def __post_init__(self) -> None:
        _positive("'verifiers'", heldout_one_in=self.heldout_one_in, most_tasks=self.most_tasks)


@dataclass(frozen=True, slots=True)
class VerifiersScorerOptions:
    """Scorer `verifiers`."""

    best: float = 1.0
    """The sum of rewards that counts as a score of 1."""

    def __post_init__(self) -> None:
        _positive("the scorer 'verifiers'", best=self.best)
