"""The PTX executor: every opcode against an independent computation, compiled kernels, planted bugs, counters."""
