/* Lane sums of whole blocks for a CPU: rows in order, lanes side by side, so that the compiler can use wide registers
   and each byte is read once where it lies. The same numbers as kv_lane_sums in kv.cu and digest.lane_sums. */
#include <stdint.h>

enum { LANES = 64 };

/* plane: where block 0's piece begins; ids: blocks, int64[n]; sums: uint64[n, LANES], written.
   nbytes: of a piece, a multiple of 8 * LANES; pitch: bytes from one block to the next. */
void lane_rows(const char *plane, const int64_t *ids, uint64_t *sums, int64_t n, int64_t nbytes, int64_t pitch) {
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t *at = (const uint64_t *)(plane + ids[i] * pitch);
        uint64_t held[LANES] = {0};
        for (int64_t row = nbytes / 8 / LANES; row > 0; --row, at += LANES)
            for (int lane = 0; lane < LANES; ++lane) held[lane] += at[lane];
        for (int lane = 0; lane < LANES; ++lane) sums[i * LANES + lane] = held[lane];
    }
}
