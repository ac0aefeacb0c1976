"""python -m tools.hf: see training/hf.py."""

from training.hf import main

if __name__ == "__main__":
    main()
