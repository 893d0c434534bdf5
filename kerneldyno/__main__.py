"""`python -m kerneldyno` is the command."""

from kerneldyno.cli import run


if __name__ == "__main__":
    run()
