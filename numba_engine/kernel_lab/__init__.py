"""Research on the CUDA kernels without a GPU: what they ask of the memory, their machine code, their predicted time."""
