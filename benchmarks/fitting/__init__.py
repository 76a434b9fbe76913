"""Fits to a given loss: the problems, a worker, and the alternation; ``python -m benchmarks.fits`` runs them."""
