/* `fast` digests of whole blocks for a CPU: rows in order, lanes side by side, so that the compiler can use wide
   registers and each byte is read once where it lies; or right after it came from another process, while it is in the
   cache. The same numbers as kv_lane_sums and kv_finish_digests in kv.cu and digest.fast_part. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/uio.h>

enum { LANES = 64, PIECES = 1024 };

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

static void make_keys(uint64_t *keys) {
    for (int lane = 0; lane < LANES; ++lane) keys[lane] = mix((uint64_t)(lane + 1) * GOLDEN) | 1;
}

/* What the piece at `at`, a multiple of 8 * LANES bytes long, adds to its block's digest as piece number `plane`. */
static uint64_t part(const uint64_t *at, int64_t nbytes, int64_t plane, const uint64_t *keys) {
    uint64_t held[LANES] = {0}, sum = (uint64_t)(plane + 1) * GOLDEN;
    for (int64_t row = nbytes / 8 / LANES; row > 0; --row, at += LANES)
        for (int lane = 0; lane < LANES; ++lane) held[lane] += at[lane];
    for (int lane = 0; lane < LANES; ++lane) sum += held[lane] * keys[lane];
    return mix(sum);
}

/* out[i], written: the digest of block ids[i]. planes: where block 0's pieces begin, pitch: bytes from one block to the
   next, nbytes: of a piece. */
void block_parts(const char *const *planes, int64_t count, const int64_t *ids, int64_t n, int64_t nbytes, int64_t pitch,
                 uint64_t *out) {
    uint64_t keys[LANES];
    make_keys(keys);
    for (int64_t i = 0; i < n; ++i) {
        out[i] = 0;
        for (int64_t p = 0; p < count; ++p)
            out[i] += part((const uint64_t *)(planes[p] + ids[i] * pitch), nbytes, p, keys);
    }
}

/* Read n pieces of another process, remote[i] into local[i], some `batch` bytes a call, and write what piece i adds to
   its block's digest to parts[i]; pieces first, first + 1, ... lie plane by plane, `blocks` in each. Returns the pieces
   read; if fewer than n, errno says why (0: the other side has less memory there than it said). */
int64_t read_parts(int64_t pid, const struct iovec *local, const struct iovec *remote, int64_t n, int64_t first,
                   int64_t blocks, int64_t batch, uint64_t *parts) {
    uint64_t keys[LANES];
    make_keys(keys);
    for (int64_t at = 0, stop; at < n; at = stop) {
        int64_t wanted = 0;
        for (stop = at; stop < n && stop - at < PIECES && (stop == at || wanted < batch); ++stop)
            wanted += (int64_t)local[stop].iov_len;
        errno = 0;
        if (process_vm_readv((pid_t)pid, local + at, (unsigned long)(stop - at), remote + at, (unsigned long)(stop - at), 0) !=
            wanted)
            return at;
        for (int64_t i = at; i < stop; ++i)
            parts[i] = part(local[i].iov_base, (int64_t)local[i].iov_len, (first + i) / blocks, keys);
    }
    return n;
}
