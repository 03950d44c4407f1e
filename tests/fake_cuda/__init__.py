"""Tests with a stand-in for the CUDA driver, which is built from libcuda.c; no GPU takes part."""
