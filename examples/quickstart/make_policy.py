"""Makes the quickstart's policy: a tokenizer, a tiny Qwen3 model, and its warm start by imitation.

    python examples/quickstart/make_policy.py            writes examples/quickstart/policy/

The policy learns from scripted sessions (`gyre_tasks.files.demos`) how to speak: the chat format, looking around,
copying names, stopping. The demonstrators do the command that a word of the brief asks for in two jobs of five, and
another one in the others; so does the policy. To be better than they are is left to reinforcement learning.

Everything is seeded: run twice on one machine with the same libraries, it writes the same weights. The sessions are
put into tokens by the renderer that the recording proxy uses at run time, turn by turn as it does it, so what was
imitated and what is sampled later agree to the token. Needs the model's family named as "qwen3" at run time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from gyre_harnesses.shell.tools import schemas
from gyre_tasks.files.demos import ELIDED, NO_OUTPUT, Demo, Habits, demos, texts
from gyre_tasks.files.generator import instances
from gyre_tasks.files.operations import OPERATIONS
from gyre_tasks.files.options import FilesOptions
from gyre_tasks.files.words import BRIEFS, SOURCES, TARGETS, WORDS
from renderers import Qwen3RendererConfig, create_renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SYSTEM = "You work in a folder."
DESCRIPTIONS = {"bash": "Run a command.", "task": "Ask a helper."}
"""System message and tool descriptions, as the recipe gives them to the harness."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CALL_HEADS = ('\n{"name": "bash", "arguments": {"command": "', '\n{"name": "task", "arguments": {"prompt": "')
CALL_TAIL = '"}}\n'
CONTEXT = 2048
LOOKING = 4
"""Messages of a session until the brief is opened: the task, `ls`, its result, `cat`."""
PIECES = Regex(r" ?[A-Za-z0-9_./\-]+| ?[^\sA-Za-z0-9_./\-]+|\n|\s+")
"""Where the tokenizer may not merge across: words (names and paths are words), punctuation, line ends."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 256
    vocabulary: int = 800
    """At most; the tokenizer has what the family's texts need."""


@dataclass(frozen=True, slots=True)
class Imitation:
    """How the warm start is trained: first short sessions, which teach copying, then whole ones."""

    seed: int = 7
    short_steps: int = 150
    steps: int = 800
    tokens: int = 1500
    """Of a batch, padding included."""
    matrix_rate: float = 0.04
    """Of Muon, which trains the matrices inside the blocks."""
    rate: float = 3e-3
    """Of AdamW, which trains the rest."""
    warmup: int = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One session in tokens; `learn[i]` says whether token i is to be imitated."""

    ids: tuple[int, ...]
    learn: tuple[bool, ...]


def tools(helper: bool) -> list[dict[str, Any]]:
    """What the harness `shell` offers under this example's recipe: a helper has no helper of its own."""
    return schemas(("bash",) if helper else ("bash", "task"), DESCRIPTIONS)


def corpus(options: FilesOptions, count: int) -> Iterator[str]:
    """Texts of the family for the tokenizer; every name and word often enough to become one token."""
    names = [f"{glue}{name}" for name in (*BRIEFS, *SOURCES, *TARGETS, *WORDS) for glue in ("", " ")]
    words = [f"{glue}{operation.word}" for operation in OPERATIONS for glue in ("", " ")]
    commands = [f"{operation.command} <" for operation in OPERATIONS]
    roles = ["system", "user", "assistant"]
    errors = ["cat: No such file or directory", "bash: line 1: command not found", "[exit 1]", "[exit 127]", "[exit 2]"]
    for _ in range(200):
        yield from (*names, *words, *commands, *roles, *errors, ELIDED, NO_OUTPUT, SYSTEM)
    draw = random.Random(0)
    for instance in islice(instances(options, "train"), count):
        yield from texts(list(demos(instance, draw, Habits())))


def make_tokenizer(options: FilesOptions, vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (nothing is out of vocabulary) with Qwen's markers.

    The unchanging parts of a tool call and of the tool block are one token each, so a call costs few tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fixed = [*CALL_HEADS, CALL_TAIL]
    room = vocabulary - len(SPECIAL) - len(MARKERS) - len(fixed) - len(tools(helper=False)) - 2
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(options, 300), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    _add(tokenizer, MARKERS)
    _add(tokenizer, [*fixed, *tool_block(_wrapped(tokenizer))])
    return _wrapped(tokenizer)


def _add(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tokens])


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def tool_block(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The unchanging texts of the tool block in a system message: its head, each definition, its foot."""
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    ids = renderer.render_ids([{"role": "system", "content": SYSTEM}], tools=tools(helper=False))
    rest = tokenizer.decode(ids).partition(SYSTEM)[2].rpartition("<|im_end|>")[0]
    parts = []
    for definition in tools(helper=False):
        text = "\n" + json.dumps(definition, ensure_ascii=False)
        before, found, rest = rest.partition(text)
        if not found:
            raise ValueError(f"cutting the tool block: {text!r} is not in what the renderer wrote")
        parts += [before, text] if before else [text]
    return [*parts, rest]


class Speaker:
    """Sessions into tokens, call by call, as the recording proxy does it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer, Qwen3RendererConfig())

    def sample(self, demo: Demo) -> Sample:
        """A session's tokens; the assistant's own from `demo.imitate_from` on are to be learnt."""
        messages, offered = [{"role": "system", "content": SYSTEM}, *demo.messages], tools(demo.helper)
        start = next(i for i, m in enumerate(messages) if m["role"] == "assistant" and i > demo.imitate_from)
        prompt = list(self._renderer.render_ids(messages[:start], tools=offered, add_generation_prompt=True))
        learn = [False] * len(prompt)
        while True:
            answer = self._answer(messages[start])
            learn += [True] * len(answer)
            results = messages[start + 1 : start + 2]
            if not results:
                return Sample((*prompt, *answer), tuple(learn))
            bridged = self._renderer.bridge_to_next_turn(prompt, answer, results, tools=offered)
            prompt = list(bridged.token_ids)
            learn += [False] * (len(prompt) - len(learn))
            start += 2

    def _answer(self, message: dict[str, Any]) -> list[int]:
        """What a policy samples to say this message, the end-of-turn token included."""
        text = message["content"]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            body = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
            text += ("\n" if text else "") + f"<tool_call>\n{body}\n</tool_call>"
        return list(self._tokenizer.encode(text + "<|im_end|>", add_special_tokens=False))


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of this shape."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        rope_theta=10_000.0,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def samples(speaker: Speaker, options: FilesOptions, seed: int, short: bool = False) -> Iterator[Sample]:
    """Demonstrations without end: whole sessions, or `short` ones (helpers', and looking around by main agents)."""
    draw = random.Random(seed)
    habits = Habits(guess=0.0, look=0.0, elide=0.0) if short else Habits()
    for instance in instances(options, "train"):
        for demo in demos(instance, draw, habits):
            looking = Demo(demo.messages[:LOOKING])
            yield speaker.sample(looking if short and not demo.helper else demo)


def batches(source: Iterator[Sample], tokens: int, pool: int = 256) -> Iterator[list[Sample]]:
    """Batches of sessions of like length, at most `tokens` tokens each with padding, in random order."""
    draw = random.Random(0)
    while True:
        ready: list[list[Sample]] = [[]]
        for sample in sorted(islice(source, pool), key=lambda s: len(s.ids)):
            if ready[-1] and (len(ready[-1]) + 1) * len(sample.ids) > tokens:
                ready.append([])
            ready[-1].append(sample)
        draw.shuffle(ready)
        yield from ready


def collate(batch: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both [batch, longest]; labels are -100 where nothing is to be learnt."""
    longest = max(len(sample.ids) for sample in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full((len(batch), longest), -100, dtype=torch.long)
    for row, sample in enumerate(batch):
        tokens = torch.tensor(sample.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = torch.where(torch.tensor(sample.learn), tokens, -100)
    return ids, labels


def loss_of(model: Qwen3ForCausalLM, batch: Sequence[Sample]) -> torch.Tensor:
    """Mean negative log-likelihood of the tokens to be learnt, nats, scalar."""
    ids, labels = collate(batch)
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    chosen = labels[:, 1:] != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]), labels[:, 1:][chosen])


def imitate(model: Qwen3ForCausalLM, stages: Sequence[tuple[Iterator[list[Sample]], int]], how: Imitation) -> float:
    """Train through (batches, steps) stages; returns the mean loss of the last fifty steps."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(inner, lr=how.matrix_rate, weight_decay=0.01, adjust_lr_fn="original")
    adam = torch.optim.AdamW(outer, lr=how.rate, betas=(0.9, 0.98), weight_decay=0.01)
    total, step = sum(steps for _, steps in stages), 0
    recent: list[float] = []
    for source, steps in stages:
        for batch in islice(source, steps):
            scale = min(1.0, (step + 1) / how.warmup, 1.05 - step / total)
            for optimizer, rate in ((muon, how.matrix_rate), (adam, how.rate)):
                optimizer.param_groups[0]["lr"] = rate * scale
                optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            muon.step()
            adam.step()
            step += 1
            recent = [*recent[-49:], float(loss.detach())]
            if step % 50 == 0:
                print(f"step {step:4d} of {total}  loss {sum(recent) / len(recent):.4f}", flush=True)
    return sum(recent) / len(recent)


def main() -> None:
    """Make the policy folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "policy")
    parser.add_argument("--steps", type=int, default=Imitation().steps, help="of whole executions")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    options, shape, how = FilesOptions(), Shape(), Imitation(steps=arguments.steps)
    tokenizer = make_tokenizer(options, shape.vocabulary)
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    speaker = Speaker(tokenizer)
    model = make_model(shape, tokenizer, how.seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    single = FilesOptions(seed=how.seed, min_jobs=1, max_jobs=1, spare_files=4, helper_share=1.0)
    stages = [
        (batches(samples(speaker, single, how.seed, short=True), how.tokens), how.short_steps),
        (batches(samples(speaker, options, how.seed), how.tokens), how.steps),
    ]
    loss = imitate(model, stages, how)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"wrote {arguments.out} after {time.monotonic() - began:.0f} s, loss {loss:.4f} nats per token")


if __name__ == "__main__":
    main()
