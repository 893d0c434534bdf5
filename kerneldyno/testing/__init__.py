"""Contract tests and device records for authors of problems, backends and kernels: inherit them in your own tests."""
