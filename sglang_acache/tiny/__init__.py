"""The bundled model: task, tokenizer, training script, weights."""
