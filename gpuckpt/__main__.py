"""`python -m gpuckpt` is the same program as `gpuckpt`."""

from gpuckpt.cli.app import main

if __name__ == "__main__":
    main()
