"""python -m tools.metrics: see evaluation/metrics.py."""

from evaluation.metrics import main

if __name__ == "__main__":
    main()
