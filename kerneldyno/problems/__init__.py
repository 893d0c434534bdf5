"""The problems: one module each, with its shapes, inputs, reference, tolerance, work and baselines."""
