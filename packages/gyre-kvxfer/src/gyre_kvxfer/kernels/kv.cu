// Gather, scatter, re-sharding, dtype conversion and digests of paged KV blocks.
//
// One source for the device (NVRTC) and for the host (host_shim.h): no headers, no shared memory, no barriers; threads
// meet only in 64-bit atomic sums, which do not depend on order. Every kernel walks its work with a grid-stride loop, so
// any launch size is correct.
//
// A box (see plan.py) is a product of index lists: run r = ((plane * segments + segment) * inner + i). Its bytes begin at
// plane_address[plane] + segment_base[segment] + (mixed-radix digits of i) . steps on each side.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define MAX_INNER 4
#define LANES 64

struct Box {
    const u64* src_plane;   // [planes] addresses
    const u64* dst_plane;   // [planes]
    const i64* src_segment; // [segments] byte offsets
    const i64* dst_segment; // [segments]
    i64 planes, segments, inner;
    i64 counts[MAX_INNER];  // extents of the inner axes, outermost first; unused ones are 1
    i64 src_step[MAX_INNER];
    i64 dst_step[MAX_INNER];
    i64 elements;           // elements of a run
};

struct Run {
    u64 src, dst;
};

__device__ static Run run_at(const Box& b, i64 r) {
    i64 i = r % b.inner;
    i64 s = (r / b.inner) % b.segments;
    i64 p = r / (b.inner * b.segments);
    Run out = {b.src_plane[p] + (u64)b.src_segment[s], b.dst_plane[p] + (u64)b.dst_segment[s]};
    for (int a = MAX_INNER - 1; a >= 0; --a) {
        i64 digit = i % b.counts[a];
        i /= b.counts[a];
        out.src += (u64)(digit * b.src_step[a]);
        out.dst += (u64)(digit * b.dst_step[a]);
    }
    return out;
}

// -- copies of one dtype: units of 16, 8, 4, 2 or 1 bytes, whichever all addresses and sizes allow -------------------

struct alignas(16) Unit16 {
    u64 a, b;
};

// `lanes` threads work on a run together; neighbours move neighbouring units.
template <typename Unit>
__device__ static void copy_box(const Box& b, i64 units, i64 lanes) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 groups = (i64)gridDim.x * blockDim.x / lanes;
    i64 group = thread / lanes;
    i64 lane = thread % lanes;
    if (group >= groups) return;
    i64 runs = b.planes * b.segments * b.inner;
    for (i64 r = group; r < runs; r += groups) {
        Run at = run_at(b, r);
        const Unit* from = (const Unit*)at.src;
        Unit* to = (Unit*)at.dst;
        i64 u = lane;
        for (; u + 3 * lanes < units; u += 4 * lanes) {
            Unit x0 = from[u], x1 = from[u + lanes], x2 = from[u + 2 * lanes], x3 = from[u + 3 * lanes];
            to[u] = x0;
            to[u + lanes] = x1;
            to[u + 2 * lanes] = x2;
            to[u + 3 * lanes] = x3;
        }
        for (; u < units; u += lanes) to[u] = from[u];
    }
}

// -- conversions -----------------------------------------------------------------------------------------------------

struct F32 {
    u32 bits;
};
struct F16 {
    u16 bits;
};
struct BF16 {
    u16 bits;
};

__device__ static float as_float(u32 bits) {
    union {
        u32 u;
        float f;
    } x;
    x.u = bits;
    return x.f;
}

__device__ static u32 as_bits(float f) {
    union {
        u32 u;
        float f;
    } x;
    x.f = f;
    return x.u;
}

__device__ static float load(F32 x) { return as_float(x.bits); }

__device__ static float load(BF16 x) { return as_float((u32)x.bits << 16); }

__device__ static float load(F16 x) {
    u32 sign = (u32)(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, mantissa = x.bits & 0x3ff;
    if (exponent == 31) return as_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent) return as_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    float tiny = (float)mantissa * 5.9604644775390625e-08f; // 2^-24, exact
    return as_float(sign | as_bits(tiny));
}

__device__ static void store(F32& x, float f) { x.bits = as_bits(f); }

__device__ static void store(BF16& x, float f) {
    u32 u = as_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        x.bits = 0x7fc0;
        return;
    }
    x.bits = (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

__device__ static void store(F16& x, float f) {
    u32 u = as_bits(f), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) {
        x.bits = (u16)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    } else if (rest >= 0x477ff000u) { // rounds to infinity
        x.bits = (u16)(sign | 0x7c00u);
    } else if (rest < 0x38800000u) { // below the smallest normal: the adder rounds to a multiple of 2^-24
        u32 sum = as_bits(as_float(rest) + 0.5f) - as_bits(0.5f);
        x.bits = (u16)(sign | sum);
    } else {
        u32 odd = (rest >> 13) & 1u;
        x.bits = (u16)(sign | ((rest + 0xfffu + odd - 0x38000000u) >> 13));
    }
}

template <typename From, typename To>
__device__ static void convert_box(const Box& b, i64 lanes) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 groups = (i64)gridDim.x * blockDim.x / lanes;
    i64 group = thread / lanes;
    if (group >= groups) return;
    i64 runs = b.planes * b.segments * b.inner;
    for (i64 r = group; r < runs; r += groups) {
        Run at = run_at(b, r);
        const From* from = (const From*)at.src;
        To* to = (To*)at.dst;
        for (i64 u = thread % lanes; u < b.elements; u += lanes) store(to[u], load(from[u]));
    }
}

// -- digests: the same numbers as digest.fast_part --------------------------------------------------------------------

__device__ static u64 mix(u64 x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Adds word w of piece (plane, block) to sums[(plane * blocks + block) * LANES + w % LANES]. `nbytes` a multiple of 8;
// `pitch`: bytes between blocks in a plane. A short last word is the caller's to pad (host pools do; see digest.py).
__device__ static void lane_sums(const u64* plane, const i64* block, u64* sums, i64 planes, i64 blocks, i64 nbytes, i64 pitch,
                                 i64 slices) {
    i64 words = nbytes / 8, rows = (words + LANES - 1) / LANES;
    i64 step = (rows + slices - 1) / slices;
    i64 total = planes * blocks * slices * LANES;
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x; t < total; t += stride) {
        i64 lane = t % LANES, piece = t / LANES / slices, slice = t / LANES % slices;
        const u64* at = (const u64*)(plane[piece / blocks] + (u64)(block[piece % blocks] * pitch));
        u64 sum = 0;
        i64 last = (slice + 1) * step < rows ? (slice + 1) * step : rows;
        for (i64 row = slice * step; row < last; ++row) {
            i64 w = row * LANES + lane;
            if (w < words) sum += at[w];
        }
        if (slices == 1) {
            sums[piece * LANES + lane] = sum;
        } else {
            atomicAdd(&sums[piece * LANES + lane], sum);
        }
    }
}

__device__ static void finish_digests(const u64* sums, u64* out, i64 planes, i64 blocks, i64 first_plane) {
    const u64 golden = 0x9E3779B97F4A7C15ull;
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x; t < planes * blocks; t += stride) {
        u64 sum = 0;
        for (int lane = 0; lane < LANES; ++lane)
            sum += sums[t * LANES + lane] * (mix((u64)(lane + 1) * golden) | 1ull);
        atomicAdd(&out[t % blocks], mix(sum + (u64)(first_plane + t / blocks + 1) * golden));
    }
}

// -- entry points ----------------------------------------------------------------------------------------------------

#define ENTRY_COPY(name, unit)                                                         \
    extern "C" __global__ void name(const Box* box, i64 units, i64 lanes) {            \
        copy_box<unit>(*box, units, lanes);                                            \
    }
ENTRY_COPY(kv_copy_16, Unit16)
ENTRY_COPY(kv_copy_8, u64)
ENTRY_COPY(kv_copy_4, u32)
ENTRY_COPY(kv_copy_2, u16)
ENTRY_COPY(kv_copy_1, u8)

#define ENTRY_CONVERT(name, from, to)                                                  \
    extern "C" __global__ void name(const Box* box, i64 lanes) { convert_box<from, to>(*box, lanes); }
ENTRY_CONVERT(kv_convert_float32_float16, F32, F16)
ENTRY_CONVERT(kv_convert_float32_bfloat16, F32, BF16)
ENTRY_CONVERT(kv_convert_float16_float32, F16, F32)
ENTRY_CONVERT(kv_convert_float16_bfloat16, F16, BF16)
ENTRY_CONVERT(kv_convert_bfloat16_float32, BF16, F32)
ENTRY_CONVERT(kv_convert_bfloat16_float16, BF16, F16)

extern "C" __global__ void kv_lane_sums(const u64* plane, const i64* block, u64* sums, i64 planes, i64 blocks, i64 nbytes,
                                        i64 pitch, i64 slices) {
    lane_sums(plane, block, sums, planes, blocks, nbytes, pitch, slices);
}

extern "C" __global__ void kv_finish_digests(const u64* sums, u64* out, i64 planes, i64 blocks, i64 first_plane) {
    finish_digests(sums, out, planes, blocks, first_plane);
}
