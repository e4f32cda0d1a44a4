"""The CUDA kernels against the float64 reference: as compiled, on the PTX executor, and on a GPU where there is one."""
