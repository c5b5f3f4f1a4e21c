"""Runs one mini-swe-agent in a process of its own; read from standard input's first line what it is to do.

Invariant: the agent, its prompts and its model class are the package's, unchanged; only where its commands run is ours:
each goes out as a JSON line and its result comes back as one. Needs mini-swe-agent 2 in its interpreter, and nothing of
Gyre. Standard output carries the protocol only; what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, TextIO


def environment(ask: Any, timeout: int) -> Any:
    """An environment of the package whose commands run elsewhere."""
    from minisweagent.environments.local import LocalEnvironment  # type: ignore[import-not-found, unused-ignore]

    class Elsewhere(LocalEnvironment):  # type: ignore[misc, unused-ignore]
        def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
            output: dict[str, Any] = ask({"run": action.get("command", ""), "cwd": cwd, "timeout": timeout})
            self._check_finished(output)
            return output

    return Elsewhere(timeout=timeout)


def work(job: dict[str, Any], send: Any, ask: Any) -> dict[str, Any]:
    """Run the agent; how it ended, in its own words."""
    from minisweagent.agents.default import AgentConfig, DefaultAgent  # type: ignore[import-not-found, unused-ignore]
    from minisweagent.config import get_config_from_spec  # type: ignore[import-not-found, unused-ignore]
    from minisweagent.models.litellm_model import LitellmModel, LitellmModelConfig  # type: ignore[import-not-found, unused-ignore]

    config = get_config_from_spec(job["config"])
    model = {key: value for key, value in config.get("model", {}).items() if key in LitellmModelConfig.model_fields}
    model["model_kwargs"] = {**model.get("model_kwargs", {}), **job["model_kwargs"]}
    model |= {"model_name": job["model"], "cost_tracking": "ignore_errors"}
    agent = {key: value for key, value in config["agent"].items() if key in AgentConfig.model_fields}
    agent |= {"step_limit": job["step_limit"], "cost_limit": 0.0}
    send({"ready": True})
    try:
        runner = DefaultAgent(LitellmModel(**model), environment(ask, job["tool_s"]), **agent)
        said = runner.run(job["prompt"])
    except Exception as error:  # noqa: BLE001 - boundary: told to the harness, which attributes it
        return {"end": type(error).__name__, "text": f"{error}\n{traceback.format_exc()[-1500:]}"}
    return {"end": said.get("exit_status", ""), "text": str(said.get("submission", ""))[:2000]}


def main() -> None:
    """Speak the protocol on the descriptors this process was started with."""
    out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(record: dict[str, Any]) -> None:
        out.write(json.dumps(record) + "\n")
        out.flush()

    def ask(record: dict[str, Any]) -> dict[str, Any]:
        send(record)
        answer: dict[str, Any] = json.loads(sys.stdin.readline())
        return answer

    send(work(json.loads(sys.stdin.readline()), send, ask))


if __name__ == "__main__":
    main()
