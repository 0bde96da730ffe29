"""Run the command line: `python -m clearhead` is the command `clearhead`."""

from clearhead_cli import main

if __name__ == "__main__":
    main()
