"""The C++ core of the cpu target: its executor, what kernels share, and the way in from Python."""
