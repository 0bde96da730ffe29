"""`python -m clearhead` is `clearhead`."""

from clearhead_cli import main

if __name__ == "__main__":
    main()
