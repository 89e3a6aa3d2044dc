"""Verifiers, and the pool of killable processes that runs them."""
