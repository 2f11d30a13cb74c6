"""Numba kernels: every @njit function of the project, arrays in and arrays out; no kernel calls another file."""
