"""`python -m syncline` is the `syncline` command."""

from syncline.cli import main

if __name__ == "__main__":
    main()
