"""The numba.cuda kernels, and the backend that runs them on a Device: a real GPU, or the PTX executor."""
