"""Flat parts of parameters under the names of files, without DeepSpeed: the parts of all ranks tile every tensor."""

from __future__ import annotations

import pytest
import torch
from gyre_core import ConfigError
from gyre_core.ranks.stored import stored_as
from gyre_deepspeed.zero import cut, in_turn

EXPERTS = [f"mlp.experts.{e}.{part}_proj.weight" for e in range(3) for part in ("gate", "up", "down")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("name", "shape"), [("mlp.experts.gate_up_proj", (3, 8, 5)), ("mlp.experts.down_proj", (3, 5, 4)), ("w", (9, 4))]
)
def test_the_parts_of_all_ranks_tile_every_tensor_once(name: str, shape: tuple[int, ...], ranks: int) -> None:
    parameter = torch.nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))
    stored = stored_as(name, shape, [*EXPERTS, "w"])
    full = {part.name: torch.full(part.shape, -1.0) for part in stored}
    flat = parameter.detach().view(-1)
    each = -(-flat.numel() // ranks)
    for rank in range(ranks):
        start, stop = min(rank * each, flat.numel()), min((rank + 1) * each, flat.numel())
        master = torch.cat([torch.zeros(11), flat[start:stop]])
        for held in cut(parameter, stored, start, stop, 0, 11):
            where = held.range.take()(full[held.range.name])
            assert bool((where == -1).all()), "filled twice"
            where.copy_(held.of(flat[start:stop]))
            assert torch.equal(where, master[held.range.offset : held.range.offset + held.range.size])
    if name.endswith("gate_up_proj"):
        wanted = {
            f"mlp.experts.{e}.{part}_proj.weight": half
            for e in range(3)
            for part, half in zip(("gate", "up"), parameter[e].chunk(2), strict=True)
        }
    elif name == "w":
        wanted = {"w": parameter}
    else:
        wanted = {f"mlp.experts.{e}.down_proj.weight": parameter[e] for e in range(3)}
    assert set(full) == set(wanted)
    assert all(torch.equal(full[key], wanted[key]) for key in full)


def test_gradients_are_fetched_one_parameter_at_a_time_and_each_once() -> None:
    experts, plain = (torch.nn.Parameter(torch.arange(float(count))) for count in (120, 36))
    names = stored_as("mlp.experts.gate_up_proj", (3, 8, 5), EXPERTS), stored_as("w", (9, 4), ["w"])
    held = [*cut(experts, names[0], 0, 120, 0, 0), *cut(plain, names[1], 0, 36, 0, 120)]
    fetched: list[torch.nn.Parameter] = []

    def fetch(parameter: torch.nn.Parameter) -> torch.Tensor:
        fetched.append(parameter)
        return parameter.detach().clone()

    found = in_turn(held, fetch)
    parts = [next(found) for _ in range(6)]
    assert [id(each) for each in fetched] == [id(experts)], "the next one was made before it was wanted"
    parts += found
    assert [id(each) for each in fetched] == [id(experts), id(plain)]
    assert torch.equal(torch.cat(parts[:6]), experts)
    assert torch.equal(parts[6], plain)


def test_a_parameter_that_files_have_as_it_is_stays_whole() -> None:
    (part,) = stored_as("mlp.experts.gate_up_proj", (3, 8, 5), ["mlp.experts.gate_up_proj"])
    assert (part.name, part.start, part.stop, part.shape) == ("mlp.experts.gate_up_proj", 0, 120, (3, 8, 5))


def test_experts_in_an_unknown_form_are_refused() -> None:
    with pytest.raises(ConfigError, match="each of its 3 experts"):
        stored_as("mlp.experts.gate_up_proj", (3, 8, 5), EXPERTS[:-4])
    with pytest.raises(ConfigError, match="w13"):
        stored_as("moe.w13", (3, 8, 5), EXPERTS)
