"""What every op means, in float64 NumPy: one function per op, named as in ``Backend``, returning what the op writes.

Kernels of every backend are tested against these.
"""
