"""The tiny models and the batches that tests share."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY = 64


def tiny_llama(attn_implementation: str = "striped_ring", dtype=torch.float32, **changes):
    """A tiny Llama with the same random weights on every rank."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return tiny_model(LlamaConfig(**{**fields, **changes}), attn_implementation, dtype)


def tiny_model(config, attn_implementation: str = "striped_ring", dtype=torch.float32):
    """A causal language model of `config` with weights from one seed, in training mode."""
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation, dtype=dtype
    )
    torch.random.set_rng_state(generator_state)
    return model.train()


def token_rows(rows: int, length: int, seed: int = 0) -> list[dict]:
    """Features with equal lengths and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens]
