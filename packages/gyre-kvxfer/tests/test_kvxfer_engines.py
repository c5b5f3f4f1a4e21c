"""Layouts of known engines, reading them off tensors, and the checks in front of stock vLLM servers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from gyre_kvxfer import LayoutRefused, MoveRefused, VerificationFailed, presets, vllm
from gyre_kvxfer.copy import execute
from gyre_kvxfer.doctor import examine
from gyre_kvxfer.plan import plan_transfer

NUMBERS = (3, 4, 8, 4, 10, "float32")
MHA = [presets.paged(*NUMBERS), presets.vllm(*NUMBERS), presets.vllm_flash(*NUMBERS)]
MHA += [presets.sglang_host(*NUMBERS, order=order) for order in presets.HICACHE]


@pytest.mark.parametrize("a", range(len(MHA)))
@pytest.mark.parametrize("b", range(len(MHA)))
def test_there_and_back_is_the_same(a, b):
    src, dst = MHA[a], replace(MHA[b], block_size=8)
    rng = np.random.default_rng(a)
    pool = [rng.integers(0, 255, src.region_nbytes).astype(np.uint8) for _ in range(src.region_count)]
    middle = [np.zeros(dst.region_nbytes, np.uint8) for _ in range(dst.region_count)]
    back = [np.zeros(src.region_nbytes, np.uint8) for _ in range(src.region_count)]
    s, d = rng.permutation(10)[:5], rng.permutation(10)[:3]
    execute(plan_transfer(src, dst, s, d, stop=20), pool, middle)
    execute(plan_transfer(dst, src, d, s, stop=20), middle, back)
    again = [np.zeros(src.region_nbytes, np.uint8) for _ in range(src.region_count)]
    execute(plan_transfer(src, src, s, s, stop=20), pool, again)
    assert all((x == y).all() for x, y in zip(back, again, strict=True))
    assert sum(int((x != 0).sum()) for x in back) > 0.9 * 20 * src.token_nbytes


def test_latent_layout_moves_between_tensor_parallel_sizes():
    one = presets.mla(2, 24, 4, 10, "bfloat16")
    plan = plan_transfer(presets.split(one, 4, 3), presets.split(one, 2, 1), np.arange(3), np.arange(3), stop=9)
    assert plan.nbytes == 9 * one.token_nbytes


def test_unknown_orders_are_refused():
    with pytest.raises(LayoutRefused):
        presets.sglang_host(*NUMBERS, order="sideways")


@dataclass
class Fake:
    """A torch tensor as far as `from_tensors` looks."""

    array: np.ndarray
    dtype: object = "torch.float32"
    device: object = "cpu"

    @property
    def shape(self):
        return self.array.shape

    def stride(self):
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def data_ptr(self):
        return self.array.ctypes.data


def test_a_layout_is_read_off_tensors_as_they_lie_in_memory():
    fused = {f"layer.{i}": Fake(np.zeros((10, 4, 16, 12), np.float32)) for i in range(3)}
    layout, regions = vllm.from_tensors(fused, "BHTKD", 4)
    assert layout == replace(presets.vllm(3, 4, 6, 16, 10, "float32"))
    assert [r.addr for r in regions] == [t.data_ptr() for t in fused.values()]
    permuted = {"a": Fake(np.zeros((10, 16, 4, 12), np.float32).transpose(0, 2, 1, 3))}
    assert vllm.from_tensors(permuted, "BHTKD", 4)[0].axes == "BTHKD"
    flash = {"a": Fake(np.zeros((2, 10, 16, 4, 6), np.float32))}
    assert vllm.from_tensors(flash, "KBTHD", 4)[0] == presets.vllm_flash(1, 4, 6, 16, 10, "float32")
    latent = {"a": Fake(np.zeros((10, 16, 24), np.float32))}
    assert vllm.from_tensors(latent, "BTD", 1)[0] == presets.mla(1, 24, 16, 10, "float32")
    padded = {"a": Fake(np.zeros((10, 20, 4, 12), np.float32)[:, :16])}
    assert vllm.from_tensors(padded, "BTHKD", 4)[0].block_pitch == 20 * 4 * 12 * 4


@pytest.mark.parametrize(
    ("tensors", "axes"),
    [
        ({}, "BHTKD"),
        ({"a": Fake(np.zeros((10, 4, 16, 12), np.float32)), "b": Fake(np.zeros((10, 2, 16, 12), np.float32))}, "BHTKD"),
        ({"a": Fake(np.zeros((10, 4, 16, 12), np.int8), "torch.int8")}, "BHTKD"),
        ({"a": Fake(np.zeros((10, 4, 16, 24), np.float32)[..., ::2])}, "BHTKD"),
        ({"a": Fake(np.zeros((10, 2, 16, 12), np.float32))}, "BHTKD"),
        ({"a": Fake(np.zeros((10, 4), np.float32))}, "BHTKD"),
    ],
)
def test_tensors_that_are_no_paged_cache_are_refused(tensors, axes):
    with pytest.raises(LayoutRefused):
        vllm.from_tensors(tensors, axes, 4)


class Servers:
    """Two stock servers as the wire shows them: an export is good for the prompt's full blocks, an import takes
    anything.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict]] = []

    async def post(self, url: str, body: dict) -> dict:
        self.seen.append((url, body))
        params = body["kv_transfer_params"]
        if params.get("do_remote_decode") and "remote_block_ids" not in params:
            full = len(body["prompt"]) // 16 * 16
            return {
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "remote_block_ids": [[1, 2]],
                    "remote_num_tokens": full,
                }
            }
        return {"choices": [{"token_ids": [7]}]}


TOKENS = np.arange(100)


async def test_a_session_is_handed_over_under_its_version():
    servers = Servers()
    answer = await vllm.hand_over(servers.post, "http://a", "http://b", "m", "s", TOKENS, 3, lambda: 0.0, max_tokens=5)
    assert answer["choices"][0]["token_ids"] == [7]
    (url_a, first), (url_b, second) = servers.seen
    assert (url_a, url_b) == ("http://a/v1/completions", "http://b/v1/completions")
    assert first["cache_salt"] == second["cache_salt"] == vllm.salt(3)
    assert second["kv_transfer_params"]["remote_num_tokens"] == 96
    assert (second["max_tokens"], first["max_tokens"]) == (5, 1)
    await vllm.hand_over(
        servers.post, "http://a", "http://b", "m", "s", TOKENS, 3, lambda: 0.0, warm=True, max_tokens=5
    )
    assert servers.seen[-1][1]["max_tokens"] == 1


async def test_what_vllm_would_take_is_refused_here():
    servers = Servers()
    answer = await servers.post("", vllm.export_request("m", TOKENS, 3))
    export = vllm.exported(answer, "s", TOKENS, 3, now=0.0)
    other = TOKENS.copy()
    other[50] = 999
    with pytest.raises(VerificationFailed, match="tokens"):
        vllm.import_request(export, "m", other, 3, 1.0)
    with pytest.raises(VerificationFailed, match="tokens"):
        vllm.import_request(export, "m", TOKENS[:90], 3, 1.0)
    with pytest.raises(VerificationFailed, match="version"):
        vllm.import_request(export, "m", TOKENS, 4, 1.0)
    with pytest.raises(MoveRefused, match="old"):
        vllm.import_request(export, "m", TOKENS, 3, 31.0)
    longer = np.concatenate([TOKENS, [5, 6]])
    assert vllm.import_request(export, "m", longer, 3, 1.0)["prompt"][-1] == 6
    for nothing in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"remote_num_tokens": 101}}):
        with pytest.raises(MoveRefused):
            vllm.exported(nothing, "s", TOKENS, 3, now=0.0)


def test_metrics_say_where_tokens_came_from():
    text = """# HELP vllm:prompt_tokens_by_source x
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 26.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 739.0
vllm:prompt_tokens_total{engine="0"} 765.0
"""
    assert vllm.prompt_tokens_by_source(text) == {"local_compute": 26, "external_kv_transfer": 739}


def test_the_doctor_says_why():
    found = {f.name: f for f in examine()}
    assert set(found) == {"process_vm", "nixl", "shm", "tcp"}
    assert all(f.reason for f in found.values())
    assert found["tcp"].usable
