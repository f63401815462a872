"""`python -m millrace` is the command `millrace`."""

from millrace.cli.main import main

if __name__ == "__main__":
    main()
