"""CUDA kernels for paged KV: one source (`kv.cu`), compiled for the device by NVRTC or for the host by g++.

Imports neither CuPy nor a compiler; `compile.py`, `device.py` and `host.py` do when they are used.
"""
