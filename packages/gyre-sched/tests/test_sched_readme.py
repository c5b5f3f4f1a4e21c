"""The README's example and the how-to's metrics reader do what they say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gyre_sched import CellId
from gyre_sched.errors import SchedError
from gyre_sched.metrics import load_from_metrics


def test_the_worked_example_trains_two_steps():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2 steps trained" in done.stdout
    assert "trained in step" in done.stdout


def test_the_table_of_predictions_is_the_benchmark_s():
    root = Path(__file__).parents[3]
    results = root / "benchmarks" / "results" / "plan_presets.json"
    if not (root / "docs").is_dir():
        pytest.skip("the package stands alone here, without the repository's pages and results")
    page = (root / "docs" / "reference" / "sched-presets.md").read_text(encoding="utf-8")
    for pair in json.loads(results.read_text())["pairs"]:
        figures = f"{pair['published']:.3g} | {pair['predicted']:.2f} | {pair['off']:+.0%}"
        assert f"| `{pair['preset']}` | {pair['pair']} | {figures} |" in page


def test_metrics_pages_become_load_reports():
    sglang = """# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.25
sglang:num_running_reqs{model_name="m",dp_rank="0"} 7.0
sglang:num_running_reqs{model_name="m",dp_rank="1"} 3.0
sglang:num_queue_reqs{model_name="m"} 2.0
"""
    load = load_from_metrics(sglang, CellId("a"), 1000, time=3.0)
    assert (load.time, load.running, load.waiting, load.kv_tokens) == (3.0, 10, 2, 250)
    vllm = (
        'vllm:num_requests_running{engine="0"} 4\n'
        'vllm:num_requests_waiting{engine="0"} 1\nvllm:kv_cache_usage_perc 0.5\n'
    )
    load = load_from_metrics(vllm, CellId("a"), 1000)
    assert (load.running, load.waiting, load.kv_tokens) == (4, 1, 500)
    with pytest.raises(SchedError, match="enable-metrics"):
        load_from_metrics("nothing 1\n", CellId("a"), 1000)
