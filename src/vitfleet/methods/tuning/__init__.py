"""Tuning of few of a pretrained model's weights: heads, biases, prompts, low-rank factors, single layers."""
