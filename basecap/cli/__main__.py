"""Run the command line as `python -m basecap.cli`."""

from basecap.cli.commands import main

if __name__ == "__main__":
    main()
