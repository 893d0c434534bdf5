"""Kerneldyno: compares and autotunes GPU kernels across DSLs."""

__version__ = "0.1.0"
