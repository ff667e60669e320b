// Functions that the program, launchers and kernels share: plain C++ where no CUDA compiles it.
#pragma once

#if defined(__CUDACC__)
#define FRESHET_HOST_DEVICE __host__ __device__
#else
#define FRESHET_HOST_DEVICE
#endif
