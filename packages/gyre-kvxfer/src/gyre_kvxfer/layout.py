"""`KVLayout`: how one engine stores keys and values, in numbers only.

A pool is a set of regions. Inside a region the KV is a dense array whose axes are named by letters:

    L layer   K key or value   B block   T token in the block   H head   D element of a head

`axes` lists the axes inside a region from outermost to innermost; `across` lists those that run over regions
(outermost first), so `across="LK"` means two regions a layer. Together they name each of L, K, B, T, H, D once; K is
absent for latent attention (MLA) and H may be left out when a rank holds one head.

Invariant: a layout describes bytes completely; two equal layouts can be copied block by block without looking inside.
It holds no addresses and knows no engine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from gyre_kvxfer.errors import LayoutRefused, explain

ITEMSIZE = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}
"""Bytes of one element, by dtype name."""

SCALED = frozenset({"float8_e4m3", "float8_e5m2"})
"""dtypes whose numbers mean nothing without scales."""

KINDS = {"mha": "LKBTHD", "mla": "LBTHD"}


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state a hybrid model keeps beside attention KV: `nbytes` a session in each of `layers` layers."""

    name: str
    layers: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of one tensor-parallel rank's pool. All counts are positive; sizes are in elements unless named bytes.

    `kv_heads` counts the whole model's KV heads; the rank holds the slice `heads`. `head_dim` is the width of a key
    (and of a value); for `kind="mla"` the width of the latent with its rotary part, `kv_heads` is 1 and every rank
    holds the same bytes. `block_pitch` is the distance between two blocks in bytes when an engine pads them (0:
    dense). `scales` names the scale set of an fp8 cache. `model` names the weights' architecture; different names
    never mix unless one is empty.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: str
    axes: str = "BTHD"
    across: str = "LK"
    kind: str = "mha"
    tp_size: int = 1
    tp_rank: int = 0
    first_layer: int = 0
    block_pitch: int = 0
    scales: str = ""
    states: tuple[StateSpec, ...] = ()
    model: str = ""

    def __post_init__(self) -> None:
        _check(self)

    # -- derived numbers -------------------------------------------------------------------------------------
    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def kinds(self) -> int:
        """2 (key and value) or 1 (latent)."""
        return 1 if self.kind == "mla" else 2

    @property
    def heads(self) -> range:
        """The model's KV heads this rank holds (replicated when there are more ranks than heads)."""
        if self.kind == "mla":
            return range(1)
        if self.kv_heads % self.tp_size == 0:
            per = self.kv_heads // self.tp_size
            return range(self.tp_rank * per, (self.tp_rank + 1) * per)
        head = self.tp_rank // (self.tp_size // self.kv_heads)
        return range(head, head + 1)

    @property
    def extents(self) -> dict[str, int]:
        """Length of each axis on this rank."""
        return {
            "L": self.layers,
            "K": self.kinds,
            "B": self.num_blocks,
            "T": self.block_size,
            "H": len(self.heads),
            "D": self.head_dim,
        }

    @property
    def strides(self) -> dict[str, int]:
        """Byte distance of each axis inside a region; axes across regions have 0."""
        out = dict.fromkeys("LKBTHD", 0)
        step = self.itemsize
        extents = self.extents
        for axis in reversed(self.axes):
            if axis == "B" and self.block_pitch:
                step = self.block_pitch
            out[axis] = step
            step *= extents[axis]
        return out

    @property
    def region_count(self) -> int:
        """Regions of one rank."""
        count = 1
        for axis in self.across:
            count *= self.extents[axis]
        return count

    @property
    def region_nbytes(self) -> int:
        """Smallest size of a region in bytes."""
        outer = self.axes[0]
        return self.strides[outer] * self.extents[outer]

    @property
    def token_nbytes(self) -> int:
        """Bytes one token takes on this rank, all layers."""
        return self.layers * self.kinds * len(self.heads) * self.head_dim * self.itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes one block takes on this rank, all layers, without padding."""
        return self.token_nbytes * self.block_size

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold `n_tokens` tokens."""
        return -(-n_tokens // self.block_size)

    def region_index(self, layer: int, kind: int) -> int:
        """Which region of the rank holds this layer (counted from this pool's first) and kind (0 key, 1 value)."""
        at = {"L": layer, "K": kind}
        index = 0
        for axis in self.across:
            index = index * self.extents[axis] + at[axis]
        return index

    # -- identity --------------------------------------------------------------------------------------------
    def block_form(self) -> tuple[object, ...]:
        """What must be equal for a block to mean the same bytes in two pools."""
        return (
            (self.layers, self.first_layer, self.kinds, self.heads.start, len(self.heads), self.head_dim),
            (self.block_size, self.dtype, self.scales, "".join(a for a in self.across + self.axes if a != "B")),
        )

    def fingerprint(self) -> str:
        """16 hex digits naming what a token's KV is, whatever its paging, split and precision."""
        said = [
            self.model,
            self.kv_heads,
            self.head_dim,
            self.kind,
            [(s.name, s.layers, s.nbytes) for s in self.states],
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON data; `from_dict` turns it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> KVLayout:
        """Build from `to_dict`'s data. Raises `LayoutRefused` for unknown or missing fields and impossible values."""
        names = {f.name: f for f in fields(cls)}
        unknown = sorted(set(data) - set(names))
        if unknown:
            raise LayoutRefused(
                explain("reading a layout", f"fields {unknown}", sorted(names), "Upgrade the older side.")
            )
        clean = dict(data)
        try:
            clean["states"] = tuple(StateSpec(**s) for s in clean.get("states", ()))  # type: ignore[attr-defined]
            for name, value in clean.items():
                if name != "states" and type(value).__name__ != names[name].type:
                    raise TypeError(f"{name} is {value!r}, not {names[name].type}")
            return cls(**clean)  # type: ignore[arg-type]
        except TypeError as err:
            raise LayoutRefused(explain("reading a layout", err, "fields of KVLayout", "Send to_dict().")) from err


def _check(x: KVLayout) -> None:
    """Raise `LayoutRefused` unless the layout is possible."""

    def need(ok: bool, came: object, expected: object) -> None:
        if not ok:
            raise LayoutRefused(explain("describing a KV layout", came, expected, "Correct the layout."))

    sizes = ("layers", "kv_heads", "head_dim", "block_size", "num_blocks", "tp_size")
    for name in sizes:
        need(0 < getattr(x, name) < 2**31, f"{name}={getattr(x, name)}", "a positive count")
    need(x.dtype in ITEMSIZE, f"dtype={x.dtype!r}", sorted(ITEMSIZE))
    need(x.kind in KINDS, f"kind={x.kind!r}", sorted(KINDS))
    need(0 <= x.tp_rank < x.tp_size, f"tp_rank={x.tp_rank}", f"0..{x.tp_size - 1}")
    need(x.first_layer >= 0, f"first_layer={x.first_layer}", "0 or more")
    need(x.kind != "mla" or x.kv_heads == 1, f"kv_heads={x.kv_heads} with mla", "1")
    need(
        x.kv_heads % x.tp_size == 0 or x.tp_size % x.kv_heads == 0,
        f"{x.kv_heads} heads over {x.tp_size} ranks",
        "one divides the other",
    )
    named = x.across + x.axes
    wanted = set(KINDS[x.kind])
    got = set(named) | ({"H"} if len(x.heads) == 1 else set())
    need(
        len(set(named)) == len(named) and got | {"H"} == wanted and ("H" in named or len(x.heads) == 1),
        f"axes={x.axes!r}, across={x.across!r}",
        f"each of {KINDS[x.kind]} once (H may be left out for one head)",
    )
    need(set(x.across) <= {"L", "K"}, f"across={x.across!r}", "only L and K run over regions")
    inside = x.axes[x.axes.index("B") + 1 :]
    dense = x.itemsize
    for axis in inside:
        dense *= x.extents[axis]
    need(
        x.block_pitch == 0 or (x.block_pitch >= dense and x.block_pitch % x.itemsize == 0),
        f"block_pitch={x.block_pitch}",
        f"0, or at least {dense} bytes and a multiple of {x.itemsize}",
    )
    if x.dtype in SCALED:
        need(bool(x.scales), f"dtype={x.dtype} without scales", "the name of its scale set in `scales`")
