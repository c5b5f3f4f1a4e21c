// Runs kv.cu on the host: a grid is two loops. Enough for kernels without shared memory and barriers.
#pragma once
#define __global__
#define __device__

struct Dim {
    long long x;
};
static thread_local Dim blockIdx, threadIdx, blockDim, gridDim;

static inline void atomicAdd(unsigned long long* at, unsigned long long value) { *at += value; }

#define HOST_LAUNCH(kernel, ...)                                                       \
    for (gridDim.x = grid, blockDim.x = block, blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) \
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel(__VA_ARGS__);
