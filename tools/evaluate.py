"""python -m tools.evaluate: see evaluation/evaluate.py."""

from evaluation.evaluate import main

if __name__ == "__main__":
    main()
