"""Run the command line as `python -m basecap`."""

from basecap.cli import main

if __name__ == "__main__":
    main()
