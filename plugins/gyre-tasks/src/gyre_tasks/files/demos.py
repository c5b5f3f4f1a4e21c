"""Scripted sessions of the family for warm starts: the format and the way around, not what the words mean.

A demonstrator looks around, reads the brief, takes its jobs in order, names each job's word and writes the right
target from the right source, but is a mediocre worker: it knows the *operation* that a word asks for in
`Habits.skill` of its jobs and does some other one in the rest. So whoever imitates it learns to speak, look, copy
names and stop, and is about as often right as wrong. To be better than its teachers is left to scores.

Invariants: sessions are a pure function of (instance, draw); every observation is what a shell in that
workspace would have printed. It also shows the accidents of real sessions, in the shares that `Habits` states:
useless looks, a name guessed wrong, histories whose first tool result was elided.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gyre_tasks.files.generator import DONE, FileJob, Instance
from gyre_tasks.files.operations import OPERATIONS, operation
from gyre_tasks.files.taskset import PROMPT
from gyre_tasks.files.words import BRIEFS

ELIDED = "[elided]"
NO_OUTPUT = "(no output)"

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a demonstrator does what need not be done; shares in [0, 1]."""

    guess: float = 0.04
    """Of sessions: open a brief by a guessed name before looking."""
    look: float = 0.12
    """Of sessions: print a data file before opening the brief."""
    skill: float = 0.4
    """Of jobs: do the operation that the word asks for; else one of the others, each as often."""
    elide: float = 0.4
    """Of sessions: the first tool result is gone from the history that later calls see."""


@dataclass(frozen=True, slots=True)
class Demo:
    """One session: OpenAI chat messages, without the system message.

    Every assistant message from `imitate_from` on is to be imitated. `helper`: it is a sub-agent's session.
    """

    messages: tuple[Message, ...]
    imitate_from: int = 0
    helper: bool = False


@dataclass(slots=True)
class _Session:
    messages: list[Message] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def call(self, name: str, arguments: dict[str, str], result: str, say: str = "") -> None:
        number = f"call_{len(self.messages)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        self.messages.append(
            {
                "role": "assistant",
                "content": say,
                "tool_calls": [{"id": number, "type": "function", "function": function}],
            }
        )
        self.messages.append({"role": "tool", "tool_call_id": number, "content": result})

    def bash(self, command: str, result: str, say: str = "") -> None:
        self.call("bash", {"command": command}, result, say)


def demos(instance: Instance, draw: random.Random, habits: Habits) -> Iterator[Demo]:
    """The sessions of one execution: the main agent's, then those of its helpers."""
    main = _Session([{"role": "user", "content": PROMPT}])
    _look_around(main, instance, draw, habits)
    start = _compact(main, draw, habits)
    for number, job in enumerate(instance.jobs, start=1):
        line = f"{number}. {job.line}"
        if job.helper:
            main.call("task", {"prompt": f"Please {job.instruction}"}, DONE, say=line)
        else:
            _work(main, job, draw, habits, line)
    main.say(f"{len(instance.jobs) + 1}. {DONE}")
    yield Demo(tuple(main.messages), start)
    for job in instance.jobs:
        if job.helper:
            helper = _Session([{"role": "user", "content": f"Please {job.instruction}"}])
            _work(helper, job, draw, habits, f"I {job.instruction}")
            helper.say(DONE)
            yield Demo(tuple(helper.messages), helper=True)


def _look_around(session: _Session, instance: Instance, draw: random.Random, habits: Habits) -> None:
    if draw.random() < habits.guess:
        name = draw.choice(BRIEFS)
        if name != instance.brief:
            session.bash(f"cat {name}", f"cat: {name}: No such file or directory\n[exit 1]")
    session.bash("ls", listing(instance, draw.random() < 0.5))
    if draw.random() < habits.look:
        name, content = draw.choice(instance.data)
        session.bash(f"cat {name}", _printed(content))
    session.bash(f"cat {instance.brief}", _printed(instance.workspace[instance.brief]))


def _compact(session: _Session, draw: random.Random, habits: Habits) -> int:
    """Maybe elide the first tool result; returns the first message to imitate from."""
    if draw.random() >= habits.elide:
        return 0
    first = next(message for message in session.messages if message["role"] == "tool")
    first["content"] = ELIDED
    return len(session.messages)


def _work(session: _Session, job: FileJob, draw: random.Random, habits: Habits, say: str) -> None:
    """Say the job, then do the operation it asks for, or in `1 - skill` of the cases another one."""
    right = operation(job.word)
    others = [each for each in OPERATIONS if each is not right]
    done = right if draw.random() < habits.skill else draw.choice(others)
    session.bash(done.shell(job.source, job.target), NO_OUTPUT, say=say)


def listing(instance: Instance, capitals_first: bool) -> str:
    """What `ls` prints in the workspace, under either order that systems sort names in."""
    names = {path.split("/")[0] for path in instance.workspace}
    return "\n".join(sorted(names) if capitals_first else sorted(names, key=str.lower))


def _printed(content: str) -> str:
    return content.rstrip("\n")


def texts(sessions: Sequence[Demo]) -> Iterator[str]:
    """Everything said in these sessions, for training a tokenizer."""
    for session in sessions:
        for message in session.messages:
            yield str(message["content"])
            for call in message.get("tool_calls", ()):
                yield from json.loads(call["function"]["arguments"]).values()
