"""`python -m clearhead` is `clearhead`."""

from .cli import main

if __name__ == "__main__":
    main()
