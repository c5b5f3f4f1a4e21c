"""Recognising a history: the same whether its text is kept or only a digest of it, and the same without shortcuts."""

from __future__ import annotations

import json
import random

import pytest
from gyre_tito import matching
from gyre_tito.dialects.chat import decode_messages
from gyre_tito.matching import Matcher, Recorded
from gyre_tito.messages import Message
from gyre_tito.requests import Transcript


def transcript(messages):
    return Transcript("chat", json.dumps(messages).encode(), decode_messages)


class Agent:
    """Appends, folds, forks and starts over; now and then another conversation is asked in between."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.lists = [[self.user()], [self.user()]]

    def user(self):
        return {"role": "user", "content": f"say {self.rng.randrange(1000)} " + "x" * self.rng.randrange(50)}

    def requests(self, steps):
        """(request, answer text): the answer is what the proxy would record for it."""
        for _ in range(steps):
            at = self.rng.randrange(2)
            messages = self.lists[at]
            answer = f"a{self.rng.randrange(50)}"
            yield list(messages), answer
            way = self.rng.random()
            messages += [{"role": "assistant", "content": answer}, self.user()]
            if way < 0.15 and len(messages) > 5:
                del messages[-4:]
                messages.append(self.user())
            elif way < 0.2:
                self.lists[at] = [self.user()]
            elif way < 0.25:
                self.lists[at] = [*messages[:-2], {"role": "assistant", "content": "edited"}, self.user()]


@pytest.mark.parametrize("budget", [0, 300, 4 << 20])
@pytest.mark.parametrize("seed", range(12))
def test_shortcuts_change_nothing(monkeypatch, budget, seed):
    monkeypatch.setattr(matching, "_TEXT_BYTES", budget)
    quick, answers = Matcher(), []
    for number, (messages, answer) in enumerate(Agent(seed).requests(60)):
        asked = transcript(messages)
        found = quick.match(asked)
        fresh = Matcher()
        for chain, text, recorded in answers:
            fresh.answered(chain, Message("assistant", text), recorded)
        assert found == fresh.match(asked)
        recorded = Recorded(number, "main", b"")
        quick.answered(found.chain, Message("assistant", answer), recorded)
        answers.append((found.chain, answer, recorded))


def test_texts_are_let_go():
    matcher = Matcher()
    for _ in range(8):
        matcher.match(transcript([{"role": "user", "content": "y" * (1 << 20) + str(_)}]))
    texts = {id(one.text): len(one.text) for one in matcher._cursors if one.text is not None}
    assert sum(texts.values()) <= (5 << 20) + 1000
    assert all(one.digest for one in matcher._cursors if one.text is None)


def test_only_what_is_new_is_decoded_also_where_a_digest_stands_for_the_text(monkeypatch):
    monkeypatch.setattr(matching, "_TEXT_BYTES", 0)
    decoded = []

    def decode(raw):
        decoded.append(len(raw))
        return decode_messages(raw)

    def ask(messages):
        matcher.match(Transcript("chat", json.dumps(messages).encode(), decode))

    matcher = Matcher()
    main = [{"role": "user", "content": "m" * 5000}]
    for number in range(4):
        ask(main)
        ask([{"role": "user", "content": f"somebody else {number}"}])
        assert any(one.text is None for one in matcher._cursors)
        main += [{"role": "user", "content": "more"}]
    assert [size > 1000 for size in decoded[::2]] == [True, False, False, False]
