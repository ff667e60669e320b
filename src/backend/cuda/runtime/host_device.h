// Marks functions that the program, launchers and kernels share: plain C++ without a CUDA compiler.
#pragma once

#if defined(__CUDACC__)
#define FRESHET_HOST_DEVICE __host__ __device__
#else
#define FRESHET_HOST_DEVICE
#endif
