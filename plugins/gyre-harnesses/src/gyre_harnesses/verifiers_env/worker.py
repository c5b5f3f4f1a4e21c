"""Lists the tasks of an environment of the package verifiers, or plays one; standard input's first line says which.

Invariant: environment, harness and rewards are the package's, unchanged; models are reached at the given address alone.
Needs verifiers 0.4 (its `v1`) in its interpreter, and nothing of Gyre. Standard output carries one line, the answer;
what libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from typing import Any


def configured(job: dict[str, Any]) -> Any:
    """The package's run configuration for this environment, with our endpoint and sampling."""
    from verifiers.v1.configs.cli.eval import EvalConfig  # type: ignore[import-not-found, unused-ignore]

    client = {"type": "eval", "base_url": job.get("base_url", "http://127.0.0.1:9/v1"), "api_key_var": "GYRE_VF_KEY"}
    table = {"env": job["env"], "client": client, "model": job.get("model", "policy"), "push": False, "rich": None}
    return EvalConfig.model_validate({**table, "sampling": job.get("sampling", {})})


def listed(job: dict[str, Any]) -> dict[str, Any]:
    """At most `limit` tasks: index, key and prompt."""
    from verifiers.v1.utils.loaders import load_environment  # type: ignore[import-not-found, unused-ignore]

    env = load_environment(configured(job).env)
    tasks = [
        {"index": task.data.idx, "key": task.key, "prompt": task.data.prompt_text, "name": task.data.name or ""}
        for task in env.taskset.take(job["limit"])
    ]
    return {"tasks": tasks}


async def played(job: dict[str, Any]) -> dict[str, Any]:
    """One episode: rewards by name, turns, how it stopped and what went wrong."""
    from verifiers.v1.clients import ModelContext  # type: ignore[import-not-found, unused-ignore]
    from verifiers.v1.utils.loaders import load_environment  # type: ignore[import-not-found, unused-ignore]

    config = configured(job)
    env = load_environment(config.env)
    index = job["index"]
    found = list(env.taskset.include(idx=[index]))
    if len(found) != 1:
        return {"error": f"{len(found)} tasks of index {index}"}
    context = ModelContext(client=config.client, model=config.model, sampling=config.sampling)
    async with env.serving():
        episode = await env.run_slot(env.slots(found[0])[0], context)
    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[name] = rewards.get(name, 0.0) + float(reward.value)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {
        "ok": bool(episode.ok),
        "rewards": rewards,
        "missing": [name for trace in episode.traces for name, reward in trace.rewards.items() if reward is None],
        "stop": [str(trace.stop_condition) for trace in episode.traces],
        "truncated": any(trace.is_truncated for trace in episode.traces),
        "late": bool(episode.is_timeout or any(trace.is_timeout for trace in episode.traces)),
        "errors": [f"{error.type}: {error.message}" for error in errors],
    }


def main() -> None:
    """One job, one answer."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        job = json.loads(sys.stdin.readline())
        answer = listed(job) if "limit" in job else asyncio.run(played(job))
    except Exception as error:  # noqa: BLE001 - boundary: told to the harness, which attributes it
        answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
