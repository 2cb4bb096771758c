"""Trained models in the formats of other software. Packages that a format needs are imported when it is written."""
