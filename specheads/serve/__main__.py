"""``python -m specheads.serve``."""

from specheads.serve import main

if __name__ == "__main__":
    main()
