"""The quickstart over three seeds: does the held-out score rise by 0.25 within eight minutes of two cores?

    python benchmarks/quickstart.py [--seeds 1 2 3] [--json]

Runs `gyre run examples/quickstart` once for each seed, one after the other, and prints the runs' own summaries with the
smallest gain and the longest time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    "score_before",
    "score_after",
    "steps",
    "role_switches",
    "satellite_joins",
    "sessions_rerouted",
    "kv_moved_sessions",
    "branches",
    "partial_scores",
    "lost_calls",
    "wall_s",
)


def run(seed: int, folder: Path) -> dict[str, float]:
    """The summary of one run."""
    command = [sys.executable, "-m", "gyre_rl", "run", str(ROOT / "examples" / "quickstart"), "--json", "--plain"]
    command += ["--set", f"seed={seed}", "--set", f"dir={folder / str(seed)}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    return {"seed": seed, **{name: summary[name] for name in KEPT}}


def main() -> None:
    """Run all seeds and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder)) for seed in asked.seeds]
    result = {
        "min_gain": min(r["score_after"] - r["score_before"] for r in runs),
        "max_wall_s": max(r["wall_s"] for r in runs),
        "lost_calls": sum(r["lost_calls"] for r in runs),
        "runs": runs,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no accelerator, Python {platform.python_version()}",
    }
    if not asked.json:
        for item in runs:
            print(
                f"seed {item['seed']}: {item['score_before']:.3f} -> {item['score_after']:.3f}, {item['wall_s']:.0f} s"
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
