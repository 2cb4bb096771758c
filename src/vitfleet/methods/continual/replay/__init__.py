"""Methods whose steps also train on stored samples of earlier tasks. Which are stored: `stored_samples.py` beside."""
