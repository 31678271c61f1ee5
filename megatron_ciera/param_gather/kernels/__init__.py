"""Triton kernels of the codecs. Import needs `triton`, which comes with torch on Linux."""
