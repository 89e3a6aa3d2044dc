"""`python -m fleuve`, and the command `fleuve`."""

import sys


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["train"]:
        from fleuve.signals import signals

        signals.install()  # before anything that takes time
    from fleuve.cli import main as command

    command()


if __name__ == "__main__":
    main()
