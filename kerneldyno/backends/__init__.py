"""Kernels, one folder a DSL: what is needed to compile and load with it, and one module for each problem."""
