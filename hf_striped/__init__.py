"""hf_striped: exact long-context training for Hugging Face models by Striped Attention."""
