// C entry points of the host build: grid and block first, then the kernel's own arguments.
#include "host_shim.h"
#include "kv.cu"

#define HOST_COPY(name)                                                                \
    extern "C" void host_##name(i64 grid, i64 block, const Box* box, i64 units, i64 lanes) { \
        HOST_LAUNCH(name, box, units, lanes)                                           \
    }
HOST_COPY(kv_copy_16)
HOST_COPY(kv_copy_8)
HOST_COPY(kv_copy_4)
HOST_COPY(kv_copy_2)
HOST_COPY(kv_copy_1)

#define HOST_CONVERT(name)                                                             \
    extern "C" void host_##name(i64 grid, i64 block, const Box* box, i64 lanes) { HOST_LAUNCH(name, box, lanes) }
HOST_CONVERT(kv_convert_float32_float16)
HOST_CONVERT(kv_convert_float32_bfloat16)
HOST_CONVERT(kv_convert_float16_float32)
HOST_CONVERT(kv_convert_float16_bfloat16)
HOST_CONVERT(kv_convert_bfloat16_float32)
HOST_CONVERT(kv_convert_bfloat16_float16)

extern "C" void host_kv_lane_sums(i64 grid, i64 block, const u64* plane, const i64* ids, u64* sums, i64 planes, i64 blocks,
                                  i64 nbytes, i64 pitch, i64 slices) {
    HOST_LAUNCH(kv_lane_sums, plane, ids, sums, planes, blocks, nbytes, pitch, slices)
}

extern "C" void host_kv_finish_digests(i64 grid, i64 block, const u64* sums, u64* out, i64 planes, i64 blocks,
                                       i64 first_plane) {
    HOST_LAUNCH(kv_finish_digests, sums, out, planes, blocks, first_plane)
}
