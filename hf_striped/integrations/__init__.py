"""Adapters to Transformers and Accelerate. Nothing below this package imports either."""
