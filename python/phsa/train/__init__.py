"""Training of Hugging Face models with PHSA."""
