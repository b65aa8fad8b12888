"""MARS (Mask AutoRegreSsion): several tokens per forward pass from an ordinary causal LM checkpoint."""

__version__ = "0.1.0"
