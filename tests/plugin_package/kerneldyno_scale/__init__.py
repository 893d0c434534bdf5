"""An example plugin of Kerneldyno; pyproject.toml names what it adds."""
