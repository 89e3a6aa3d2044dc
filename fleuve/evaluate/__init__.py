"""Benchmark scoring: accuracy, pass@k, confidence intervals."""
