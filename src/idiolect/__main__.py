"""`python -m idiolect`."""

from idiolect.cli import main

if __name__ == "__main__":
    main(prog_name="python -m idiolect")
