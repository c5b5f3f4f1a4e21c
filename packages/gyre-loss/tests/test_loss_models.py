"""Which models a tree loss takes, and how it says no."""

from __future__ import annotations

from dataclasses import replace

import gyre_loss as gl
import numpy as np
import pytest
import torch
from gyre_loss.compute import Options
from gyre_loss.hf import HFTreeModel
from gyre_loss.model import RecurrentLayersError, TreeModel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, Qwen3Config, Qwen3ForCausalLM

NAN = float("nan")
SIZES = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def forked() -> gl.TreeBatch:
    """A prompt and three branches."""
    return gl.TreeBatch.from_arrays(
        node_parent=[-1, 0, 0, 0],
        node_start=[0, 3, 6, 9, 12],
        token_ids=[1, 2, 3, 4, 5, 6, 4, 7, 8, 9, 9, 9],
        sampled=[False] * 3 + [True] * 9,
        logprobs=[NAN] * 3 + [-2.0] * 9,
        versions=[-1] * 3 + [0] * 9,
        advantage=1.0,
    )


def mamba() -> nn.Module:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=11, hidden_size=16, num_hidden_layers=2, state_size=4))


@pytest.mark.parametrize("method", ["packed", "dfs"])
def test_recurrent_layers_are_refused_with_their_numbers(method):
    with pytest.raises(RecurrentLayersError, match=r"layers \[0, 1\] are recurrent"):
        gl.tree_loss(mamba(), forked(), gl.PolicyLoss(), method=method)


def test_recurrent_layers_fall_back_to_branches_where_asked():
    """The state is forked by computing each path by itself: each token's log-probability is that of its own path."""
    model = mamba()
    result = gl.tree_loss(model, forked(), gl.PolicyLoss(), options=Options(recurrent="branches"))
    assert result.method == "branches"
    result.loss.backward()
    got = gl.token_logprobs(model, forked(), options=Options(recurrent="branches"))
    for branch in range(3):
        ids = torch.tensor([[1, 2, 3, *[[4, 5, 6], [4, 7, 8], [9, 9, 9]][branch]]])
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
        want = log_p[torch.arange(2, 5), ids[0, 3:]].numpy()
        assert np.abs(got[3 * branch : 3 * branch + 3] - want).max() < 1e-5


def test_hybrid_layers_are_found_by_their_type():
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=8))
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert HFTreeModel(model).recurrent_layers == (1,)


def test_sliding_windows_in_the_dense_mask_run_along_the_path():
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, **HEADS, head_dim=8, use_sliding_window=True, sliding_window=2, max_window_layers=0)
    model = Qwen3ForCausalLM(config)
    assert model.config.layer_types[1] == "sliding_attention"
    want = gl.token_logprobs(model, forked(), method="branches")
    assert np.abs(gl.token_logprobs(model, forked(), method="packed") - want).max() < 1e-5
    with pytest.raises(ValueError, match="a sliding window of 2 tokens"):
        gl.token_logprobs(model, forked(), method="dfs")
    with pytest.raises(ValueError, match="a sliding window of 2 tokens"):
        gl.token_logprobs(model, forked(), options=Options(attention="blocked"))


def test_layers_that_take_no_attention_are_noticed():
    """ALiBi models compute attention by themselves: their tokens would see across branches."""
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=11, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match=r"0 of 2 layers that let their attention be given"):
        gl.tree_loss(model, forked(), gl.PolicyLoss())


def test_models_of_another_family_work():
    """Learned absolute positions: they too run along the path."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    want = gl.token_logprobs(model, forked(), method="branches")
    for method in ("packed", "dfs"):
        assert np.abs(gl.token_logprobs(model, forked(), method=method) - want).max() < 1e-5


def test_dropout_is_refused_while_training():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attention_dropout=0.1)).train()
    with pytest.raises(ValueError, match=r"attention dropout 0.1"):
        gl.tree_loss(model, forked(), gl.PolicyLoss())
    gl.tree_loss(model.eval(), forked(), gl.PolicyLoss())


def test_models_with_other_logits_are_refused():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping = 30\.0"):
        gl.tree_loss(model, forked(), gl.PolicyLoss())


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "a model"])
def test_what_is_no_causal_model_is_refused(thing):
    with pytest.raises(ValueError, match=r"a transformers causal"):
        gl.tree_loss(thing, forked(), gl.PolicyLoss())


def test_a_switched_model_is_not_called_without_a_tree():
    from gyre_loss import hf

    hf.register()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    model.set_attn_implementation(hf.NAME)
    with pytest.raises(ValueError, match="called without a tree"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("method", ["packed", "dfs"])
def test_gradient_checkpointing_changes_nothing(method):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        gl.accumulate(model, forked(), gl.PolicyLoss(), method=method, options=Options(chunk_tokens=2))
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match="forward and backward inside one session"):
        gl.tree_loss(model, forked(), gl.PolicyLoss())
    with HFTreeModel(model).session():
        gl.tree_loss(model, forked(), gl.PolicyLoss()).loss.backward()


def test_a_model_of_ones_own():
    inner = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    adapted = HFTreeModel(inner)

    class Mine:
        device = property(lambda self: adapted.device)
        layers = property(lambda self: adapted.layers)
        recurrent_layers = ()
        hidden = staticmethod(adapted.hidden)
        causal_hidden = staticmethod(adapted.causal_hidden)
        head = staticmethod(adapted.head)
        session = staticmethod(adapted.session)
        parameters = staticmethod(adapted.parameters)

    assert isinstance(Mine(), TreeModel)
    want = gl.token_logprobs(inner, forked())
    np.testing.assert_array_equal(gl.token_logprobs(Mine(), forked()), want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "fast"}, "method 'fast'"),
        ({"options": Options(attention="other")}, "kind 'other'"),
        ({"options": Options(recurrent="guess")}, "recurrent = 'guess'"),
        ({"method": "dfs", "options": Options(chunk_tokens=0)}, "chunk_tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
    ],
)
def test_bad_options_are_named(arguments, message):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    with pytest.raises(ValueError, match=message):
        gl.tree_loss(model, forked(), gl.PolicyLoss(), **arguments)


def test_a_batch_without_entries_is_refused():
    context = gl.TreeBatch.from_arrays(
        node_parent=[-1], node_start=[0, 1], token_ids=[1], sampled=[False], logprobs=[NAN], versions=[-1]
    )
    with pytest.raises(ValueError, match="without loss entries"):
        gl.tree_loss(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), context, gl.PolicyLoss())


def mixture() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        **SIZES,
        **HEADS,
        head_dim=8,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
    return model


def own_choice(model: nn.Module, batch: gl.TreeBatch) -> np.ndarray:
    """The experts that the model itself picks for each token of the batch, int16[N, layers, k]."""
    from gyre_loss.experts import routers

    seen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda m, i, out: seen.append(out[2])) for router in routers(model)]
    gl.token_logprobs(model, batch, options=Options(replay_experts=False))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy().astype(np.int16)


def test_recorded_experts_are_replayed_by_every_method():
    model, plain = mixture(), forked()
    own = own_choice(model, plain)
    want = gl.token_logprobs(model, plain)
    np.testing.assert_allclose(gl.token_logprobs(model, replace(plain, routed_experts=own)), want, atol=1e-6)
    other = replace(plain, routed_experts=((own + 1) % 4).astype(np.int16))
    moved = gl.token_logprobs(model, other, method="branches")
    assert np.abs(moved - want).max() > 1e-3, "another routing is another network"
    for method in ("packed", "dfs"):
        got = gl.token_logprobs(model, other, method=method, options=Options(chunk_tokens=2))
        np.testing.assert_allclose(got, moved, atol=1e-5)
    silent = replace(plain, routed_experts=np.full_like(own, -1))
    np.testing.assert_allclose(gl.token_logprobs(model, silent), want, atol=1e-6)
    gl.accumulate(model, other, gl.PolicyLoss())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.zeros((12, 3, 2), np.int16), "2 top-k routers in the model; expected 3"),
        (np.zeros((12, 2, 1), np.int16), r"recorded experts \(12, 1\) in layer 0; expected \(12, 2\)"),
        (np.full((12, 2, 2), 9, np.int16), "expert 9 in layer 0; expected experts below 4"),
    ],
)
def test_experts_that_do_not_fit_are_named(experts, message):
    with pytest.raises(ValueError, match=message):
        gl.token_logprobs(mixture(), replace(forked(), routed_experts=experts))


def test_experts_for_a_dense_model_are_refused():
    batch = replace(forked(), routed_experts=np.zeros((12, 2, 2), np.int16))
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    with pytest.raises(ValueError, match="0 top-k routers"):
        gl.token_logprobs(model, batch)
    gl.token_logprobs(model, batch, options=Options(replay_experts=False))
