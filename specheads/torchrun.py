"""Start a training on every process of a machine: ``python -m specheads.torchrun ...``."""

from specheads.system.launch import main

if __name__ == "__main__":
    main()
