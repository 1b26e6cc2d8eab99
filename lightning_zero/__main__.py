"""``python -m lightning_zero`` is the program ``lightning-zero``."""

from lightning_zero.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
