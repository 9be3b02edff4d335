"""Imported once by the fork server, so that a rank process starts in no time."""

import accelerate  # noqa: F401  each is imported for its effect on the fork
import torch
import transformers
import transformers.trainer  # noqa: F401

import hf_striped  # noqa: F401

torch.set_num_threads(1)
