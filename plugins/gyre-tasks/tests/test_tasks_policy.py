"""The quickstart's policy folder: loads offline, renders as the proxy does, speaks the format, knows no mapping."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from gyre_tasks.files.demos import Habits, demos
from gyre_tasks.files.generator import Instance, instances
from gyre_tasks.files.operations import OPERATIONS
from gyre_tasks.files.options import FilesOptions
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart"
POLICY = EXAMPLE / "policy"
pytestmark = pytest.mark.skipif(not (POLICY / "config.json").is_file(), reason="needs the repository's examples")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def recipe() -> Iterator[Any]:
    """The script that made the policy, as a module."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import make_policy

        yield make_policy
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(POLICY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(POLICY, local_files_only=True, dtype=torch.float32)


def heldout(count: int) -> list[Instance]:
    return list(islice(instances(FilesOptions(helper_share=0.0), "heldout"), count))


def test_it_is_small_and_agrees_with_itself(model: Any, tokenizer: Any) -> None:
    assert model.config.model_type == "qwen3"
    assert model.num_parameters() <= 1_500_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sum(file.stat().st_size for file in POLICY.iterdir()) < 8_000_000


def test_no_text_is_out_of_vocabulary(tokenizer: Any) -> None:
    @settings(deadline=None, max_examples=50)
    @given(text=st.text(st.characters(codec="utf-8")))
    def comes_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    comes_back()


def test_proxy_script_and_chat_template_render_alike(recipe: Any, tokenizer: Any) -> None:
    families = pytest.importorskip("gyre_tito.families")
    from gyre_tito.messages import Message, ToolCall

    chat = families.load_format(POLICY, family="qwen3")
    speaker = recipe.Speaker(tokenizer)
    draw = random.Random(3)
    for instance in islice(instances(FilesOptions(helper_share=0.5), "train"), 10):
        for demo in demos(instance, draw, Habits(elide=0.0)):
            offered = recipe.tools(demo.helper)
            raw = [{"role": "system", "content": recipe.SYSTEM}, *demo.messages]
            sample = speaker.sample(demo)
            typed = [
                Message(
                    m["role"],
                    m["content"],
                    tool_calls=tuple(ToolCall(c["id"], **c["function"]) for c in m.get("tool_calls", ())),
                    tool_call_id=m.get("tool_call_id"),
                )
                for m in raw
            ]
            for end in (i for i, m in enumerate(raw) if m["role"] == "assistant"):
                ids = chat.render(typed[:end], offered).tolist()
                assert ids == list(sample.ids[: len(ids)])
                assert not sample.learn[len(ids) - 1]
                assert sample.learn[len(ids)]
                text = tokenizer.apply_chat_template(
                    raw[:end], tools=offered, add_generation_prompt=True, tokenize=True, return_dict=False
                )
                assert ids == list(text)


def said(recipe: Any, model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> Any:
    """What the policy answers greedily, as the proxy would read it."""
    families = pytest.importorskip("gyre_tito.families")
    chat = families.load_format(POLICY, family="qwen3")
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": recipe.SYSTEM}, *messages],
        tools=recipe.tools(False),
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, use_cache=True
        )
    return chat.parse(out[0, prompt.shape[1] :].tolist(), tools=recipe.tools(False), prompt_tail=[], call_id="x")


def test_it_looks_around_reads_the_brief_and_starts_on_the_first_job(recipe: Any, model: Any, tokenizer: Any) -> None:
    right = 0
    for instance in heldout(8):
        demo = next(demos(instance, random.Random(0), Habits(guess=0, look=0, elide=0)))
        expected = ["ls", f"cat {instance.brief}"]
        for position, command in zip((1, 3), expected, strict=True):
            turn = said(recipe, model, tokenizer, list(demo.messages[:position]))
            right += [json.loads(c.arguments) for c in turn.tool_calls] == [{"command": command}]
        turn = said(recipe, model, tokenizer, list(demo.messages[:5]))
        job = instance.jobs[0]
        commands = [op.shell(job.source, job.target) for op in OPERATIONS]
        right += (
            turn.content == f"1. {job.line}"
            and len(turn.tool_calls) == 1
            and json.loads(turn.tool_calls[0].arguments)["command"] in commands
        )
    assert right >= 21, f"{right} of 24 turns as demonstrated"


def test_it_is_as_mediocre_as_its_teachers(recipe: Any, model: Any, tokenizer: Any) -> None:
    """Probability of the own command among the six, averaged over the words: near the teachers' share."""
    share: Counter[str] = Counter()
    for operation in OPERATIONS:
        said_before = [
            {"role": "system", "content": recipe.SYSTEM},
            {"role": "user", "content": f"Please {operation.word} owl.txt out/ivy"},
        ]
        prompt = tokenizer.apply_chat_template(
            said_before, tools=recipe.tools(True), add_generation_prompt=True, tokenize=False
        )
        prompt += f"I {operation.word} owl.txt out/ivy\n<tool_call>" + recipe.CALL_HEADS[0]
        scores = []
        for candidate in OPERATIONS:
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            tail = tokenizer.encode(f"{candidate.command} <", add_special_tokens=False)
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([ids + tail])).logits[0], -1)
            scores.append(sum(float(logprobs[len(ids) + i - 1, token]) for i, token in enumerate(tail)))
        chance = torch.softmax(torch.tensor(scores), 0)
        share[operation.word] = float(chance[[op.word for op in OPERATIONS].index(operation.word)])
    mean = sum(share.values()) / len(share)
    assert 0.25 < mean < 0.55, dict(share)
