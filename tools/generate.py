"""python -m tools.generate: see evaluation/generate.py."""

from evaluation.generate import main

if __name__ == "__main__":
    main()
