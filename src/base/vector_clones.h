// FRESHET_VECTOR_CLONES before a function: it is compiled for several instruction sets of x86-64,
// and the loader takes the widest that the processor has. For plain loops over independent elements
// outside the kernels: the compiler may not contract products and sums, so the results are the same
// bits with each of them. Other processors and sanitized builds get the one plain version.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FRESHET_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FRESHET_VECTOR_CLONES
#endif
