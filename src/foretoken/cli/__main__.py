"""`python -m foretoken.cli` is the same as the `foretoken` command."""

from foretoken.cli import main

if __name__ == "__main__":
    main()
