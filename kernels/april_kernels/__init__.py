"""Kernels that pack, unpack and check the KV pages of suspended samples."""
