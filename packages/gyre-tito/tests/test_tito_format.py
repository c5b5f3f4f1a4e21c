"""The bridge between turns: for text that encodes canonically it equals a whole rendering; else it only appends."""

from __future__ import annotations

import numpy as np
import pytest
from gyre_tito.families import make_format
from gyre_tito.messages import Message, ToolCall
from gyre_tito.testing import tiny_format, tiny_tokenizer
from gyre_tito.tokenizer import FastTokenizer, FormatError

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
USER = Message("user", "What is in a.txt?\n")
NEW = {
    "user": (Message("user", " and b?"),),
    "two": (Message("user", "x"), Message("system", "y")),
}


def array(ids):
    return np.asarray(ids, dtype=np.int32)


def test_long_and_short_texts_are_encoded_alike():
    tokenizer = tiny_tokenizer()
    text = "read the file <think>\nä€ 漢字</think> <|im_end|>\n" * 200
    pieces = [text[at : at + 900] for at in range(0, len(text), 900)]
    assert len(text) > 4096
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == tokenizer.encode_with_offsets(text)[0]
    assert all(tokenizer.encode(one) == tokenizer.encode_with_offsets(one)[0] for one in pieces)


def test_what_a_caller_does_to_ids_stays_with_the_caller():
    tokenizer = tiny_tokenizer()
    right = tokenizer.encode_with_offsets("assistant\n")[0]
    tokenizer.encode("assistant\n").append(0)
    assert tokenizer.encode("assistant\n") == right


@pytest.mark.parametrize("new", NEW.values(), ids=NEW.keys())
@pytest.mark.parametrize("family", ["qwen3", "default"])
def test_bridging_a_canonical_turn_is_rendering_it(family, new):
    chat = tiny_format(family)
    prompt = chat.render([USER], ())
    sampled = array([*chat.tokenizer.encode("It says 5."), chat.stop_ids[0]])
    more = chat.extend(prompt[-512:], sampled, new, ())
    whole = chat.render([USER, Message("assistant", "It says 5."), *new], ())
    assert [*prompt, *sampled, *more] == whole.tolist()


def test_bridging_tool_results_is_rendering_them():
    chat = tiny_format("qwen3")
    call = ToolCall("1", "read", '{"path": "a"}')
    prompt = chat.render([USER], (TOOL,))
    text = 'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    sampled = array([*chat.tokenizer.encode(text), chat.stop_ids[0]])
    results = (Message("tool", "5", tool_call_id="1"), Message("tool", "6", tool_call_id="1"), Message("user", "so?"))
    more = chat.extend(prompt[-512:], sampled, results, (TOOL,))
    whole = chat.render([USER, Message("assistant", "I look.", None, (call,)), *results], (TOOL,))
    assert [*prompt, *sampled, *more] == whole.tolist()


@pytest.mark.parametrize("family", ["qwen3", "default"])
def test_a_turn_that_was_cut_is_closed_by_context(family):
    chat = tiny_format(family)
    prompt = chat.render([USER], ())
    cut = array(chat.tokenizer.encode("It says"))
    more = chat.extend(prompt[-512:], cut, NEW["user"], ())
    assert more[0] == chat.stop_ids[0]
    assert chat.decode(more.tolist()).startswith("<|im_end|>\n<|im_start|>user\n and b?")


def test_what_the_renderer_would_drop_is_kept():
    """A stop token in the middle (an engine that ignored it), and reasoning that never ended."""
    chat = tiny_format("qwen3")
    prompt = chat.render([USER], ())
    stop = chat.stop_ids[0]
    for sampled in ([5, stop, 6, 7], [*chat.tokenizer.encode("<think>\nhm"), stop]):
        more = chat.extend(prompt[-512:], array(sampled), NEW["user"], ())
        text = chat.decode([*sampled, *more.tolist()])
        assert text.startswith(chat.decode(sampled))
        assert text.endswith("<|im_start|>user\n and b?<|im_end|>\n<|im_start|>assistant\n")
        assert text.count("<|im_start|>") == 2


def test_an_edited_turn_goes_in_as_context():
    chat = tiny_format("qwen3")
    sampled = array([*chat.tokenizer.encode("one"), chat.stop_ids[0]])
    new = (Message("user", "u"), Message("assistant", "EDITED"), Message("user", "v"))
    text = chat.decode(chat.extend(chat.render([USER], ())[-512:], sampled, new, ()).tolist())
    assert "EDITED<|im_end|>\n<|im_start|>user\nv<|im_end|>" in text


def test_a_template_that_depends_on_its_history_is_not_bridged():
    counting = "{% for m in messages %}[{{ messages|length }}]{{ m.content }}<|im_end|>{% endfor %}"
    plain = tiny_tokenizer()
    tokenizer = FastTokenizer(plain._backend, name="t", eos_token="<|im_end|>", chat_template=counting)
    chat = make_format(tokenizer)
    assert chat.extend(array([1]), array([2, chat.stop_ids[0]]), NEW["user"], ()) is None


def test_formats_that_cannot_work_say_why():
    with pytest.raises(FormatError, match="no chat template"):
        make_format(FastTokenizer(tiny_tokenizer()._backend, name="t", eos_token="<|im_end|>"))
    with pytest.raises(FormatError, match="special tokens"):
        make_format(tiny_tokenizer(), family="llama-3")
    with pytest.raises(FormatError, match="history must be"):
        make_format(tiny_tokenizer(), history="both")
    with pytest.raises(FormatError, match="no-such"):
        make_format(tiny_tokenizer(), family="no-such")
